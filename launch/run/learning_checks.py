"""Observers of a run's steps that warn if nothing is learnt from them, or if the budget cuts nearly all completions."""

from collections.abc import Callable, Mapping, Sequence
from math import ceil, isnan
from statistics import fmean

from configs.schema import RunConfig
from launch.run.step_timer import DispatchedStep

# Steps before the first warning. Each warning doubles the number for the next.
PATIENCE = 5
# Groups before a warning in a run that has learnt: a few groups have equal rewards by chance, again and again.
LEAST_GROUPS = 50
# Share of completions cut by the budget from which a run warns.
NEARLY_ALL = 0.9
ADVANTAGES = "groups/sequences_with_advantage"
CAUSES = (
    "reward/failed",
    "reward/mean",
    "rollout/truncated",
    "groups/zero_variance",
    "groups/too_old",
)

# Called with a step and a line.
Warn = Callable[[int, str], None]


class LearningSignal:
    """Observer of steps that warns if nothing was learnt from many steps in a row.

    These are steps whose updates had no gradient, and with the built-in loss also those in which no sequence had an
    advantage: a gradient is then that of a KL term or of routers. A loss of one's own may learn from something else,
    and a teacher teaches without rewards.
    No other metric is alarming.
    """

    def __init__(self, config: RunConfig, warn: Warn) -> None:
        self._config, self._warn, self._patience = config, warn, max(2, min(PATIENCE, config.steps))
        self._steps: list[dict[str, float]] = []

    def __call__(self, step: DispatchedStep) -> None:
        config, metrics = self._config, step.metrics
        empty = int(metrics["update/empty"]) == config.updates.count
        learns_otherwise = config.loss.function is not None or config.teacher.learns_from_teacher
        if not empty and (learns_otherwise or int(metrics[ADVANTAGES]) > 0):
            groups = config.rollout.finished_groups(config.data.prompts)
            self._steps, self._patience = [], max(self._patience, ceil(LEAST_GROUPS / max(groups, 1)))
            return
        known = {name: float(metrics[name]) for name in CAUSES if name in metrics}
        self._steps.append({**known, ADVANTAGES: float(metrics[ADVANTAGES])})
        if len(self._steps) == self._patience:
            self._warn(step.number, nothing_learnt(config, self._steps))
            self._steps, self._patience = [], 2 * self._patience


def nothing_learnt(config: RunConfig, steps: Sequence[Mapping[str, float]]) -> str:
    """Return the warning about these steps: how many, and the causes with their remedies, most frequent first.

    steps: `ADVANTAGES` and the metrics `CAUSES` of each step, as far as the rollout function reports them.
    """
    without = [step for step in steps if not step[ADVANTAGES]]
    learnt, own = f"WARNING: nothing was learnt from the last {len(steps)} steps, in ", config.loss.function
    if not without or own and len(without) < len(steps):
        because = f": loss.function = {own} does not depend on theta" if own else ""
        return f"{learnt}which no update had a gradient{because}"
    if len(without) < len(steps):
        learnt += f"{len(without)} of "
    steps = without
    groups = config.rollout.finished_groups(config.data.prompts)
    failed = _mean(steps, "reward/failed") / (groups * config.rollout.group_size)
    # Groups without a reward count as equal, and no larger group would change that.
    equal = _mean(steps, "groups/zero_variance") / groups if failed < 1 else 0.0
    reward = _mean(steps, "reward/mean")
    too_old = _mean(steps, "groups/too_old") / config.data.prompts
    causes = [
        (too_old, "of the groups were dropped for their age: raise rollout.max_age or rollout.carry_over"),
        (failed, "of the completions could not be scored: look for errors of reward.scorer, raise reward.time_limit_s"),
        (_mean(steps, "rollout/truncated"), f"of the completions {_cut(config)}"),
        (
            equal,
            f"of the groups had equal rewards (mean reward {reward:.3g}): raise rollout.group_size, choose problems "
            "that the policy solves sometimes, or check that reward.scorer reads its answers",
        ),
    ]
    causes = sorted(causes, key=lambda cause: cause[0], reverse=True)
    found = [f"{share:.0%} {text}" for share, text in causes if share > 0]
    return (
        f"{learnt}which no sequence had an advantage other than 0. "
        f"{'; '.join(found) or 'The rewards differ, but not where they count'}"
    )


class CutCompletions:
    """Observer of steps that warns if the budget cuts nearly all completions of many steps, or of an evaluation."""

    def __init__(self, config: RunConfig, warn: Warn) -> None:
        self._config, self._warn, self._patience = config, warn, min(PATIENCE, config.steps)
        self._shares: list[float] = []
        self._evaluation_cut = False

    def __call__(self, step: DispatchedStep) -> None:
        share = float(step.metrics.get("rollout/truncated", float("nan")))
        # A rollout function of one's own may not report it, and with carry-over no sequence may have ended.
        if isnan(share):
            return
        self._shares = [*self._shares, share][-self._patience :]
        if len(self._shares) == self._patience and (mean := fmean(self._shares)) >= NEARLY_ALL:
            steps = f"the last {self._patience} steps" if self._patience > 1 else "this step"
            self._warn(step.number, f"WARNING: {mean:.0%} of the completions of {steps} {_cut(self._config)}")
            self._shares, self._patience = [], 2 * self._patience

    def evaluated(self, step: int, share: float) -> None:
        """Warn of an evaluation after `step`, once until fewer are cut. share: of its completions that were cut."""
        cut = share >= NEARLY_ALL
        if cut and not self._evaluation_cut:
            self._warn(step, f"WARNING: {share:.0%} of the held-out completions {_by_budget(self._config)}: raise it")
        self._evaluation_cut = cut


def _cut(config: RunConfig) -> str:
    """Return what happened to completions of steps that were cut, and the options to change."""
    if config.selection.drop_truncated:
        return f"{_by_budget(config)}, and dropped: raise it, or set selection.drop_truncated = False"
    return f"{_by_budget(config)}: raise it"


def _by_budget(config: RunConfig) -> str:
    return f"were cut by the budget, rollout.max_new_tokens = {config.rollout.max_new_tokens}"


def _mean(steps: Sequence[Mapping[str, float]], metric: str) -> float:
    """Return the mean over the steps that have a value, 0 if none has."""
    values = [step[metric] for step in steps if metric in step]
    return fmean([value for value in values if value == value] or [0.0])

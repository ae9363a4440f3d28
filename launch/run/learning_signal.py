"""Warning about steps from which the policy learns nothing, with the cause and what to change."""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from configs.schema import RunConfig
from launch.run.step_timer import Step

# Steps in a row without an advantage before the first warning. Each warning doubles the number for the next.
PATIENCE = 5
ADVANTAGES = "groups/sequences_with_advantage"
CAUSES = (
    "reward/failed",
    "reward/mean",
    "rollout/truncated",
    "groups/zero_variance",
    "groups/unfinished",
    "groups/too_old",
)


class LearningSignal:
    """Observer of steps that warns if no sequence of many steps in a row had an advantage.

    Such steps have gradient 0, or that of a KL term alone. No other metric is alarming.

    warn: called with the step and one line.
    """

    def __init__(self, config: RunConfig, warn: Callable[[int, str], None]) -> None:
        self._config, self._warn, self._patience = config, warn, PATIENCE
        self._steps: list[dict[str, float]] = []

    def __call__(self, step: Step) -> None:
        if int(step.metrics[ADVANTAGES]) > 0:
            self._steps = []
            return
        self._steps.append({name: float(step.metrics[name]) for name in CAUSES if name in step.metrics})
        if len(self._steps) == self._patience:
            self._warn(step.number, nothing_learnt(self._config, self._steps))
            self._steps, self._patience = [], 2 * self._patience


def nothing_learnt(config: RunConfig, steps: Sequence[Mapping[str, float]]) -> str:
    """Return the warning about these steps: how many, and the causes with their remedies, most frequent first.

    steps: the metrics `CAUSES` of each step, as far as the rollout function reports them.
    """
    groups = config.data.prompts
    failed = _mean(steps, "reward/failed") / (groups * config.rollout.group_size)
    truncated = _mean(steps, "rollout/truncated")
    # Groups without a reward count as equal, and no larger group would change that.
    equal = _mean(steps, "groups/zero_variance") / groups if failed < 1 else 0.0
    budget, reward = config.rollout.max_new_tokens, _mean(steps, "reward/mean")
    cut = f"were cut by the budget, rollout.max_new_tokens = {budget}"
    if config.selection.drop_truncated:
        cut += ", and dropped: raise it, or set selection.drop_truncated = False"
    else:
        cut += ": raise it"
    unfinished, too_old = (_mean(steps, name) / groups for name in ("groups/unfinished", "groups/too_old"))
    causes = [
        (unfinished, "of the groups were not finished: raise rollout.carry_over, or lower rollout.group_size"),
        (too_old, "of the groups were dropped for their age: raise rollout.max_age or rollout.carry_over"),
        (failed, "of the completions could not be scored: look for errors of reward.scorer, raise reward.time_limit_s"),
        (truncated, f"of the completions {cut}"),
        (
            equal,
            f"of the groups had equal rewards (mean reward {reward:.3g}): raise rollout.group_size, choose problems "
            "that the policy solves sometimes, or check that reward.scorer reads its answers",
        ),
    ]
    causes = sorted(causes, key=lambda cause: cause[0], reverse=True)
    found = [f"{share:.0%} {text}" for share, text in causes if share > 0]
    return (
        f"WARNING: nothing was learnt from the last {len(steps)} steps, in which no sequence had an advantage other "
        f"than 0. {'; '.join(found) or 'The rewards differ, but not where they count'}"
    )


def _mean(steps: Sequence[Mapping[str, float]], metric: str) -> float:
    """Return the mean over the steps that have a value, 0 if none has."""
    values = [step[metric] for step in steps if metric in step]
    return fmean([value for value in values if value == value] or [0.0])

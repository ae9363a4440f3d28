"""Observers of a run's steps that warn of what goes wrong, or end the run."""

import re
from collections.abc import Callable, Mapping, Sequence
from math import isnan
from pathlib import Path
from statistics import fmean

import numpy as np

from configs.schema import RunConfig
from launch.cli.errors import RunStopped
from launch.run.step_timer import DispatchedStep
from specjax.checkpoint import Checkpointer
from specjax.parallel import processes
from specjax.types import Mixture

# Number of files to keep. The newest stay: the last checkpoint is closest to the networks that they need.
KEPT_FILES = 4
NAME = re.compile(r"skipped_step_(\d+)\.npz")

# Steps in a row without an advantage before the first warning. Each warning doubles the number for the next.
PATIENCE = 5
ADVANTAGES = "groups/sequences_with_advantage"
CAUSES = (
    "reward/failed",
    "reward/mean",
    "rollout/truncated",
    "groups/zero_variance",
    "groups/too_old",
)

# Routers collapse beyond these shares: of the tokens of a layer that an expert sees, and of experts that see none.
MOST_TOKENS, MOST_UNUSED = 0.9, 0.5


class SkippedUpdates:
    """Observer of steps that saves the batch if an update of the policy or of the draft was skipped.

    The file is `skipped_step_N.npz` in the run's directory. It holds the prompts as `prompt_NAME` and every array of
    the `TrainBatch` under its own name. With the networks of a checkpoint, and the rows that its state replays, these
    are all inputs of the losses.

    limit:     end the run after this many steps in a row that skipped an update; 0: never.
    last_step: the step after which the run resumes. Files of later steps are deleted.
    reason:    one line that says why the run must end, or None.
    in_a_row:  number of last steps in a row that skipped an update.
    """

    def __init__(self, directory: Path, limit: int, last_step: int = 0) -> None:
        self._directory, self._limit, self.in_a_row = directory, limit, 0
        self.reason: str | None = None
        for step, file in self._files().items():
            if step > last_step and processes.primary():
                file.unlink()

    def __call__(self, step: DispatchedStep) -> None:
        if not int(step.metrics["update/skipped"]) + int(step.metrics.get("draft/skipped", 0)):
            self.in_a_row = 0
            return
        self.in_a_row += 1
        path = self._save(step)
        if self.in_a_row == self._limit and self.reason is None:
            self.reason = (
                f"step {step.number}: updates were skipped in {self._limit} steps in a row because a loss or a "
                f"gradient is not finite; the last batch is in {path}"
            )

    def _save(self, step: DispatchedStep) -> Path:
        path = self._directory / f"skipped_step_{step.number}.npz"
        arrays = {f"prompt_{name}": x for name, x in vars(step.prompts).items()} | vars(step.rollout.batch)
        kept = processes.fetch({name: x for name, x in arrays.items() if x is not None})
        if processes.primary():
            np.savez(path, **kept)  # pyright: ignore[reportArgumentType]
            files = self._files()
            for old in sorted(files)[:-KEPT_FILES]:
                files[old].unlink()
        return path

    def _files(self) -> dict[int, Path]:
        matches = ((NAME.fullmatch(file.name), file) for file in self._directory.iterdir())
        return {int(match[1]): file for match, file in matches if match}


def describe_healthy(saves: Checkpointer) -> str:
    """Return which checkpoint of a run that skipped updates is healthy, and how to use it."""
    step = saves.newest_healthy()
    if step is None:
        return "there is no healthy checkpoint"
    return (
        f"the last healthy checkpoint is that of step {step}: other programs read it with --checkpoint-step {step}; to "
        "resume from it, move the newer ones away"
    )


class LearningSignal:
    """Observer of steps that warns if no sequence of many steps in a row had an advantage.

    Such steps have gradient 0, or only that of a KL term. No other metric is alarming.

    warn: called with the step and one line.
    """

    def __init__(self, config: RunConfig, warn: Callable[[int, str], None]) -> None:
        self._config, self._warn, self._patience = config, warn, PATIENCE
        self._steps: list[dict[str, float]] = []

    def __call__(self, step: DispatchedStep) -> None:
        if int(step.metrics[ADVANTAGES]) > 0:
            self._steps = []
            return
        self._steps.append({name: float(step.metrics[name]) for name in CAUSES if name in step.metrics})
        if len(self._steps) == self._patience:
            self._warn(step.number, nothing_learnt(self._config, self._steps))
            self._steps, self._patience = [], 2 * self._patience


class RouterLoad:
    """Observer of steps that warns, once until they recover, if routers give nearly all tokens to a few experts.

    warn: called with the step and one line.
    """

    def __init__(self, mixture: Mixture, warn: Callable[[int, str], None]) -> None:
        self._equal, self._warn, self._collapsed = mixture.active / mixture.experts, warn, False

    def __call__(self, step: DispatchedStep) -> None:
        tokens, unused = float(step.metrics["router/load_max"]) * self._equal, float(step.metrics["router/unused"])
        if isnan(tokens):
            return
        # If every second expert sees a token, one that sees all is no fault.
        collapsed = unused > MOST_UNUSED or tokens > MOST_TOKENS > 2 * self._equal
        if collapsed and not self._collapsed:
            self._warn(
                step.number,
                f"WARNING: the routers collapse: an expert sees {tokens:.0%} of the tokens of its layer (an equal "
                f"share is {self._equal:.1%}), and {unused:.0%} of all experts see none. Raise "
                "loss.router_aux_loss_coef, or lower policy_optimizer.learning_rate",
            )
        self._collapsed = collapsed


def nothing_learnt(config: RunConfig, steps: Sequence[Mapping[str, float]]) -> str:
    """Return the warning about these steps: how many, and the causes with their remedies, most frequent first.

    steps: the metrics `CAUSES` of each step, as far as the rollout function reports them.
    """
    groups = config.rollout.finished_groups(config.data.prompts)
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
    too_old = _mean(steps, "groups/too_old") / config.data.prompts
    causes = [
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


def check_lag(lag: int | None, step: DispatchedStep) -> None:
    """Raise RunStopped if the rollout of an asynchronous step was not generated by the networks that the lag asks for.

    A run has no networks from before its first update, so the first `lag` steps have smaller ones.
    """
    if lag is None:
        return
    updates, found = step.number - 1, int(step.metrics["asynchronous/lag"])
    if found != min(lag, updates):
        raise RunStopped(
            f"step {step.number}: its rollout was generated by the networks after update {updates - found}, and "
            f"asynchronous.lag = {lag} asks for those after update {max(updates - lag, 0)}; the sending of the "
            "networks is at fault"
        )


def _mean(steps: Sequence[Mapping[str, float]], metric: str) -> float:
    """Return the mean over the steps that have a value, 0 if none has."""
    values = [step[metric] for step in steps if metric in step]
    return fmean([value for value in values if value == value] or [0.0])

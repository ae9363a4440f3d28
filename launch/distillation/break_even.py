"""After how many steps of RL a distilled draft has paid for itself, by what rollouts save.

Not measured is what the draft adds to training in each step: its forward pass, and its gradient if it learns online.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from launch.build.experiment import Experiment
from launch.costs.rollout_timer import RolloutTimer
from launch.distillation.trainer import DistillationCost
from launch.timing import interleaved, interval
from specjax.drafters import Drafter, NoDrafter
from specjax.rollout.generate import make_prepare, per_shard
from specjax.types import Params


@dataclass(frozen=True)
class BreakEven:
    """The seconds of a step's rollout without the draft and with it at a draft length, turn by turn.

    cost_s: seconds of the distillation, generation and training.
    """

    autoregressive_s: Sequence[float]
    speculative_s: Sequence[float]
    cost_s: float
    draft_length: int

    @property
    def saved_s(self) -> tuple[float, float, float]:
        """Seconds that a rollout, not its step, is shorter with the draft: (median, low, high), a 95% interval."""
        return interval(np.subtract(self.autoregressive_s, self.speculative_s).tolist())

    @property
    def steps(self) -> int | None:
        """Steps after which the seconds that rollouts save make up for the cost; None for never."""
        saved, _, _ = self.saved_s
        return math.ceil(self.cost_s / saved) if saved > 0 else None

    def to_json(self) -> dict[str, Any]:
        """Return the measurements and what follows from them."""
        saved, low, high = self.saved_s
        found = {"saved_s": saved, "saved_s_low": low, "saved_s_high": high, "steps": self.steps}
        return asdict(self) | found | {"counted": "rollouts"}

    def describe(self) -> str:
        """Return a line for people."""
        plain, drafted = float(np.median(self.autoregressive_s)), float(np.median(self.speculative_s))
        saved, low, high = self.saved_s
        times = (
            f"a step's rollout takes {plain:.4g} s without the draft and {drafted:.4g} s with it at draft length "
            f"{self.draft_length}"
        )
        if self.steps is None:
            return f"{times}: the draft never pays for itself here"
        doubt = " (the interval holds 0: not certain to pay at all)" if low <= 0 else ""
        return (
            f"{times}, {saved:.3g} s less [{low:.3g}, {high:.3g}]{doubt}: {self.cost_s:.1f} s of distillation are paid "
            f"for after {self.steps} steps, of which rollouts alone are counted, not the draft's part in training"
        )


def largest_saving(results: Sequence[BreakEven]) -> BreakEven:
    """Return the draft length that saves most."""
    return max(results, key=lambda result: result.saved_s[0])


def measure_break_even(
    experiment: Experiment, drafter: Drafter, params: Params, cost: DistillationCost, repeats: int
) -> list[BreakEven]:
    """Time rollouts of a step's batch of training prompts at each of the run's draft lengths, against draft length 0.

    A turn has the same noise for all.
    """
    rollout, mesh, policy = experiment.train.rollout, experiment.mesh, experiment.networks.policy
    prompts = experiment.train_prompts.batch(np.arange(experiment.config.data.prompts))

    def measure(drafter: Drafter, params: Params, draft_length: int) -> Callable[[], float]:
        config = replace(rollout, draft_length=draft_length, draft_lengths=())
        generate = per_shard(experiment.rollout_fn, policy, drafter, config, mesh)
        prepared = partial(make_prepare(params, policy.dtype), params)
        timer = RolloutTimer(generate, policy, prepared, [prompts], mesh, None, seed=experiment.config.seed)
        turns = itertools.count()
        return lambda: timer.measure(next(turns), None).seconds

    runs = {length: measure(drafter, params, length) for length in rollout.lengths if length}
    runs = {0: measure(NoDrafter(), replace(params, draft={}), 0)} | runs
    seconds = interleaved(runs, repeats)
    spent = cost.generation_s + cost.training_s
    return [BreakEven(seconds[0], seconds[length], spent, length) for length in seconds if length]

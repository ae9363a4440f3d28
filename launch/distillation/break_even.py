"""Break-even point of a distilled draft: the RL steps after which faster rollouts have paid for it.

Not measured is what the draft adds to training in each step: its forward pass, and its gradient if it learns online.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

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
    """Break-even point at one draft length.

    autoregressive_s: seconds of a step's rollout without the draft, turn by turn. speculative_s: those with it.
    cost_s:           seconds of the distillation, generation and training.
    saved_s:          seconds that a rollout, not its step, is shorter with the draft: median and 95% interval.
    steps:            steps after which the seconds that rollouts save make up for the cost; None for never.
    counted:          what is: rollouts.
    """

    autoregressive_s: list[float]
    speculative_s: list[float]
    cost_s: float
    draft_length: int
    saved_s: float
    saved_s_low: float
    saved_s_high: float
    steps: int | None
    counted: str = "rollouts"

    def describe(self) -> str:
        """Return a line for people."""
        times = (
            f"a step's rollout takes {median(self.autoregressive_s):.4g} s without the draft and "
            f"{median(self.speculative_s):.4g} s with it at draft length {self.draft_length}"
        )
        if self.steps is None:
            return f"{times}: the draft never pays for itself here"
        doubt = " (the interval holds 0: not certain to pay at all)" if self.saved_s_low <= 0 else ""
        return (
            f"{times}, {self.saved_s:.3g} s less [{self.saved_s_low:.3g}, {self.saved_s_high:.3g}]{doubt}: "
            f"{self.cost_s:.1f} s of distillation are paid for after {self.steps} steps, of which rollouts alone are "
            "counted, not the draft's part in training"
        )


def break_even(
    autoregressive_s: list[float], speculative_s: list[float], cost_s: float, draft_length: int
) -> BreakEven:
    """Return what a draft saves and when that makes up for its cost, by the seconds of rollouts turn by turn."""
    saved_s, low, high = interval(np.subtract(autoregressive_s, speculative_s).tolist())
    steps = math.ceil(cost_s / saved_s) if saved_s > 0 else None
    return BreakEven(autoregressive_s, speculative_s, cost_s, draft_length, saved_s, low, high, steps)


def measure_break_even(
    experiment: Experiment, drafter: Drafter, params: Params, cost: DistillationCost, repeats: int
) -> list[BreakEven]:
    """Time rollouts of a step's batch of training prompts at each of the run's draft lengths, against draft length 0.

    A turn has the same noise for all.
    """
    rollout, mesh, policy = experiment.config.rollout, experiment.mesh, experiment.networks.policy
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
    return [break_even(seconds[0], seconds[length], spent, length) for length in seconds if length]

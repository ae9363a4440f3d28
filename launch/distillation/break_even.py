"""Break-even point of a distilled draft: the number of RL steps after which faster rollouts repay its distillation.

The estimate counts only rollouts. It ignores the time that the draft adds to each training step: its forward pass, and
its gradient if it is trained online.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import numpy as np

from launch.build.experiment import Experiment
from launch.cli.unfinished import Unfinished
from launch.costs.rollout_timer import RolloutTimer
from launch.costs.turns import timed_turns
from launch.distillation.cost import DistillationCost
from launch.timing import interval
from specjax.drafters import Drafter, NoDrafter
from specjax.rollout.generate import make_prepare, per_shard
from specjax.types import Params


@dataclass(frozen=True)
class BreakEven:
    """Break-even point at one draft length.

    Attributes:
        autoregressive_s: seconds of a step's rollout without the draft, in each turn.
        speculative_s:    seconds of a step's rollout with the draft, in each turn.
        cost_s:           seconds of the distillation, generation and training together.
        draft_length:     draft length of the speculative rollouts.
        saved_s:          seconds that the draft saves per rollout: median over the turns.
        saved_s_low:      lower end of its 95% interval.
        saved_s_high:     upper end of its 95% interval.
        steps:            number of steps after which the saved seconds exceed the cost; None: never.
        counted:          the part of a step that the estimate counts.
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
        """Return the result as text for the console."""
        times = (
            f"a step's rollout takes {median(self.autoregressive_s):.4g} s without the draft and "
            f"{median(self.speculative_s):.4g} s with it at draft length {self.draft_length}"
        )
        if self.steps is None:
            return f"{times}: distillation does not pay off"
        caveat = " (the interval includes 0: it may never pay off)" if self.saved_s_low <= 0 else ""
        return (
            f"{times}, saving {self.saved_s:.3g} s [{self.saved_s_low:.3g}, {self.saved_s_high:.3g}]{caveat}: "
            f"{self.cost_s:.1f} s of distillation pay off after {self.steps} steps, "
            "counting only rollouts, not the draft's cost in training"
        )


def break_even(
    autoregressive_s: list[float], speculative_s: list[float], cost_s: float, draft_length: int
) -> BreakEven:
    """Return the break-even point from paired seconds of rollouts without and with the draft, one pair per turn."""
    saved_s, low, high = interval(np.subtract(autoregressive_s, speculative_s).tolist())
    steps = math.ceil(cost_s / saved_s) if saved_s > 0 else None
    return BreakEven(autoregressive_s, speculative_s, cost_s, draft_length, saved_s, low, high, steps)


def measure_break_even(
    experiment: Experiment,
    drafter: Drafter,
    params: Params,
    cost: DistillationCost,
    repeats: int,
    unfinished: Unfinished,
) -> list[BreakEven]:
    """Return the break-even point at each of the run's draft lengths above 0.

    Times rollouts of one training batch, interleaved with rollouts without the draft. All rollouts of a turn use the
    same noise. Raises Stopped at a signal.
    """
    rollout, mesh, policy = experiment.config.rollout, experiment.mesh, experiment.networks.policy
    prompts = experiment.train_prompts.batch(np.arange(experiment.config.data.prompts))

    def timer(drafter: Drafter, params: Params, draft_length: int) -> Callable[[int], float]:
        config = replace(rollout, draft_length=draft_length, draft_lengths=())
        generate = per_shard(experiment.rollout_fn, policy, drafter, config, mesh)
        prepared = partial(make_prepare(policy, drafter, params), params)
        timer = RolloutTimer(generate, policy, prepared, [prompts], mesh, None, seed=experiment.config.seed)
        return lambda turn: timer.measure(turn, None).seconds

    runs, lengths = {}, [length for length in rollout.lengths if length]
    with unfinished.phase("compiling of rollouts to time", 1 + len(lengths), "programs", kept=False) as phase:
        for length in (0, *lengths):
            networks = (drafter, params) if length else (NoDrafter(), replace(params, draft={}))
            runs[str(length)] = timer(*networks, length)
            phase.finish()
    turns = timed_turns(unfinished.phase("rollouts with and without the draft", repeats, "turns"), runs)
    seconds = {length: [turn[str(length)] for turn in turns] for length in (0, *lengths)}
    cost_s = cost.generation_s + cost.training_s
    return [break_even(seconds[0], seconds[length], cost_s, length) for length in lengths]

"""After how many steps of RL a distilled draft has paid for itself, by what rollouts save.

What training takes longer for a draft is not measured here, which each step pays again: its forward, by which it is
watched, and where it learns online its gradient.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from launch.build.experiment import Experiment
from launch.distillation.trainer import Cost
from launch.timing import in_turns, interval, seconds
from specjax.drafters import Drafter, NoDrafter
from specjax.keys import seed_step
from specjax.rollout.generate import make_generate, place
from specjax.types import Params


@dataclass(frozen=True)
class Payback:
    """The seconds that the rollout of a step takes without the draft and with it at some draft length, in turns.

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

    def as_json(self) -> dict[str, Any]:
        """The measurements and what they come to."""
        saved, low, high = self.saved_s
        found = {"saved_s": saved, "saved_s_low": low, "saved_s_high": high, "steps": self.steps}
        return asdict(self) | found | {"counted": "rollouts"}

    def __str__(self) -> str:
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


def best(paybacks: Sequence[Payback]) -> Payback:
    """The one that saves most."""
    return max(paybacks, key=lambda payback: payback.saved_s[0])


def measure_payback(
    experiment: Experiment, drafter: Drafter, params: Params, cost: Cost, repeats: int
) -> list[Payback]:
    """Rollouts of a step's batch of training prompts, at draft length 0 and at each of the run's.

    A turn has the same noise for all; programs are compiled before the clock starts.
    """
    rollout, mesh = experiment.train.rollout, experiment.mesh
    prompts = place(experiment.train_prompts.batch(np.arange(experiment.config.data.prompts)), mesh)
    everywhere = NamedSharding(mesh, P())

    def program(drafter: Drafter, draft_length: int):
        config = replace(rollout, draft_length=draft_length, draft_lengths=())
        generate = make_generate(experiment.networks.policy, drafter, config, mesh)

        def measure(turns: Iterator[int]) -> float:
            noise = jax.device_put(seed_step(experiment.config.seed, -2 - next(turns)), everywhere)
            return seconds(partial(generate, params, prompts, noise))

        measure(itertools.count())
        return partial(measure, itertools.count())

    drafted = [length for length in rollout.lengths if length > 0]
    turns = in_turns({0: program(NoDrafter(), 0)} | {length: program(drafter, length) for length in drafted}, repeats)
    spent = cost.generation_s + cost.training_s
    return [Payback(turns[0], turns[length], spent, length) for length in drafted]

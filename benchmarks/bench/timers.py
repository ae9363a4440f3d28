"""Timers of rounds and rollouts for the networks of the bench."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np

from benchmarks.bench.models import BenchNetworks, random_prompts
from benchmarks.bench.presets import LongTail
from benchmarks.bench.rollout_timer import RolloutTimer
from benchmarks.bench.stubs import forced_rollout
from launch.costs.round_timer import RoundTimer, TimedRounds
from specjax.drafters import Drafter, NoDrafter
from specjax.keys import SeedStep, seed_step
from specjax.rollout.plan import Phase, RolloutConfig
from specjax.rollout.speculative import speculative_rollout
from specjax.types import Params, Prompts, Rollout

Name = TypeVar("Name")


def round_timer(
    networks: BenchNetworks,
    drafter: Drafter,
    rows: int,
    context: int,
    kinds: Mapping[Name, tuple[Drafter, int]],
    count: int,
    options: dict[str, Any] | None = None,
    room_for: int = 0,
) -> RoundTimer[Name]:
    """Return a timer of rounds.

    Args:
        networks: the policy and its parameters.
        drafter:  drafter whose state the rows hold.
        rows:     rows decoded together.
        context:  positions that each row attends to.
        kinds:    by name, the drafter that proposes and the draft length.
        count:    rounds per measurement.
        options:  XLA compiler options.
        room_for: longest draft length of rounds that are compared with these: all see caches of the same length.
    """
    longest = max(k for _, k in kinds.values())
    # With this budget no row ends within the rounds. The caches stay blank, because a prefill could take much longer.
    budget = count * (max(longest, room_for) + 1) + 1
    config, phase = (
        RolloutConfig(group_size=1, max_new_tokens=budget, draft_length=longest),
        Phase(rows, context + budget),
    )
    timed = {name: TimedRounds(phase, k, proposer) for name, (proposer, k) in kinds.items()}
    prompts = random_prompts(networks, rows, context)
    return RoundTimer(
        networks.policy, drafter, config, prompts, networks.mesh, timed, count, blank=True, options=options
    )


def rollout_timer(
    networks: BenchNetworks,
    prompts: Prompts | Sequence[Prompts],
    config: RolloutConfig,
    forced: bool = True,
    tail: LongTail | None = None,
) -> RolloutTimer:
    """Return a timer of whole rollouts. Its `generate` and `measure` take (turn, acceptance rate as float32).

    prompts: the same prompts for every turn, or a sequence with the prompts of each turn.
    forced:  accept drafted tokens at the rate and force the lengths of `tail`, if given. False: sample as in training.
    """
    drafter = networks.drafter if max(config.lengths) else NoDrafter()

    def generate(params: Params, prompts: Prompts, _: SeedStep, rate: jax.Array) -> Rollout:
        rollout = partial(forced_rollout, rate=rate, tail=tail) if forced else speculative_rollout
        # Every turn has the same noise, so batches of different turns or sizes generate the same sequences.
        return rollout(networks.policy, drafter, params, prompts, seed_step(0, 0), config)

    turns = [prompts] if isinstance(prompts, Prompts) else prompts
    return RolloutTimer(generate, networks.policy, lambda: networks.params, turns, networks.mesh, np.float32(0))

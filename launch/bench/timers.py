"""Timers of rounds and of rollouts, for the networks of the bench."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np

from launch.bench.models import Networks, random_prompts
from launch.bench.presets import LongTail
from launch.bench.stubs import forced_rollout
from launch.costs.rollout_timer import RolloutTimer
from launch.costs.round_timer import RoundTimer, TimedRounds
from specjax.drafters import Drafter, NoDrafter
from specjax.keys import SeedStep, seed_step
from specjax.rollout.plan import Phase, RolloutConfig
from specjax.rollout.speculative import speculative_rollout
from specjax.types import Params, Prompts, Rollout

Name = TypeVar("Name")


def round_timer(
    networks: Networks,
    drafter: Drafter,
    rows: int,
    context: int,
    kinds: Mapping[Name, tuple[Drafter, int]],
    count: int,
    options: dict[str, Any] | None = None,
) -> RoundTimer[Name]:
    """Time `count` rounds of `rows` rows that see `context` positions each.

    drafter: whose state it is. kinds: by name, who proposes and how many tokens. options: XLA's.
    """
    longest = max(k for _, k in kinds.values())
    # No row ends within the rounds, and no prefill fills the caches: it may take far longer than what is measured.
    budget = count * (longest + 1) + 1
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
    networks: Networks,
    prompts: Prompts | Sequence[Prompts],
    config: RolloutConfig,
    forced: bool = True,
    tail: LongTail | None = None,
) -> RolloutTimer:
    """Time completions of the prompts of each turn. Its `generate` and `measure` take (turn, rate float32).

    forced: keep a drafted token at that rate, and with a `tail` give completions its lengths; else sample as in
            training.
    """
    drafter = networks.drafter if max(config.lengths) else NoDrafter()

    def generate(params: Params, prompts: Prompts, _: SeedStep, rate: jax.Array) -> Rollout:
        rollout = partial(forced_rollout, rate=rate, tail=tail) if forced else speculative_rollout
        # The same noise in every turn: a sequence is the same, whichever others are generated with it.
        return rollout(networks.policy, drafter, params, prompts, seed_step(0, 0), config)

    turns = [prompts] if isinstance(prompts, Prompts) else prompts
    return RolloutTimer(generate, networks.policy, lambda: networks.params, turns, networks.mesh, np.float32(0))

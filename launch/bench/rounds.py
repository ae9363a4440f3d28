"""The seconds of a round: some of them, run by `specjax.rounds.rounds` in one compiled program."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from launch.bench.networks import Networks, compiled, random_prompts
from launch.measure import seconds, without_start
from specjax.drafters import Drafter
from specjax.keys import seed_step
from specjax.mesh import decoding_options
from specjax.plan import RolloutConfig
from specjax.queue import blank, prefill, seat
from specjax.rounds import Decoding, RoundState, rounds
from specjax.types import Params

STARTS = 5


class Rounds:
    """Rounds at draft length k over `rows` rows that see `context` positions each: compiled when made.

    The caches are blank: what a round costs does not hang on what is in them. Every measurement starts at the same
    context, and the state is donated from one to the next, so that the caches exist once. What it takes to start the
    program, the least of some calls that run no round, is left out: of short rounds it is a good part.

    options: XLA's, for this program.
    """

    def __init__(
        self,
        networks: Networks,
        drafter: Drafter,
        rows: int,
        context: int,
        k: int,
        count: int,
        options: dict[str, Any] | None = None,
    ) -> None:
        budget = count * (k + 1) + 1
        config = RolloutConfig(group_size=1, max_new_tokens=budget, draft_length=k)
        prompts = random_prompts(networks, rows, context)

        def first(params: Params) -> RoundState:
            decoding = Decoding(networks.policy, drafter, params, config)
            kept = replace(blank(lambda: prefill(decoding, prompts, jnp.bool_(True))), prompts=prompts)
            row, length = jnp.arange(rows, dtype=jnp.int32), context + budget + config.slack
            return seat(decoding, kept, row, row, seed_step(0, 0), length)

        def some(params: Params, state: RoundState, count: Int[Array, ""]) -> RoundState:
            decoding = Decoding(networks.policy, drafter, params, config)
            one = jnp.ones(rows, jnp.int32)
            state = replace(state, emitted=one, done=one == 0)
            return rounds(decoding, state, k, lambda _, trips: trips == count)[0]

        self._params, self._count, self._none = networks.params, jnp.int32(count), jnp.int32(0)
        self._state = jax.jit(first, compiler_options=decoding_options())(networks.params)
        parts = networks.params, self._state, self._none
        self._program, self.compile_seconds = compiled(some, *parts, donate=(1,), options=options)
        jax.block_until_ready(self._run(self._count))
        self._start = min(seconds(partial(self._run, self._none)) for _ in range(STARTS))

    def measure(self) -> float:
        """The seconds of one round."""
        return without_start(seconds(partial(self._run, self._count)), self._start) / int(self._count)

    def _run(self, count: Int[Array, ""]) -> RoundState:
        self._state = self._program(self._params, self._state, count)
        return self._state

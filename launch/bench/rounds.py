"""The seconds of a round: some of them, run by `specjax.rounds.rounds` in one compiled program."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from launch.bench.networks import Networks, compiled, random_prompts
from launch.bench.report import Row
from launch.measure import seconds, without_start
from specjax.drafters import Drafter
from specjax.keys import seed_step
from specjax.mesh import decoding_options
from specjax.plan import RolloutConfig
from specjax.queue import blank, prefill, seat
from specjax.rounds import Decoding, RoundState, rounds
from specjax.types import Params, Prompts

STARTS = 5


def seated(decoding: Decoding, prompts: Prompts, length: int) -> RoundState:
    """Rows at their first token, their caches of `length` positions blank: what a round costs does not hang on them."""
    kept = replace(blank(lambda: prefill(decoding, prompts, jnp.bool_(True))), prompts=prompts)
    row = jnp.arange(len(prompts.lengths), dtype=jnp.int32)
    return seat(decoding, kept, row, row, seed_step(0, 0), length)


def some_rounds(decoding: Decoding, k: int, state: RoundState, count: Int[Array, ""]) -> RoundState:
    """`count` rounds at draft length k, from the first token of each row on."""
    one = jnp.ones_like(state.emitted)
    state = replace(state, emitted=one, done=one == 0)
    return rounds(decoding, state, k, lambda _, trips: trips == count)[0]


class Rounds:
    """Rounds of `rows` rows that see `context` positions each, at any of the `lengths` of drafts: compiled when made.

    Every measurement starts at the same context, and the state, with room for `count` rounds at the longest draft, is
    donated from one to the next, so that the caches exist once. What it takes to start a program, the least of some
    calls that run no round, is left out: of short rounds it is a good part.

    options: XLA's, for these programs.
    """

    def __init__(
        self,
        networks: Networks,
        drafter: Drafter,
        rows: int,
        context: int,
        lengths: Sequence[int],
        count: int,
        options: dict[str, Any] | None = None,
    ) -> None:
        budget = count * (max(lengths) + 1) + 1
        config = RolloutConfig(group_size=1, max_new_tokens=budget, draft_length=max(lengths))
        prompts = random_prompts(networks, rows, context)

        def first(params: Params) -> RoundState:
            decoding = Decoding(networks.policy, drafter, params, config)
            return seated(decoding, prompts, context + budget + config.slack)

        def some(k: int, params: Params, state: RoundState, count: Int[Array, ""]) -> RoundState:
            return some_rounds(Decoding(networks.policy, drafter, params, config), k, state, count)

        self._params, self._count, self._none = networks.params, jnp.int32(count), jnp.int32(0)
        self._state = jax.jit(first, compiler_options=decoding_options())(networks.params)
        parts = networks.params, self._state, self._none
        made = {k: compiled(partial(some, k), *parts, donate=(1,), options=options) for k in lengths}
        self._programs = {k: program for k, (program, _) in made.items()}
        self.compile_seconds = sum(taken for _, taken in made.values())
        for k in lengths:
            jax.block_until_ready(self._run(k, self._count))
        self._start = {k: min(seconds(partial(self._run, k, self._none)) for _ in range(STARTS)) for k in lengths}

    def measure(self, k: int) -> float:
        """The seconds of one round at draft length k."""
        return without_start(seconds(partial(self._run, k, self._count)), self._start[k]) / int(self._count)

    def _run(self, k: int, count: Int[Array, ""]) -> RoundState:
        self._state = self._programs[k](self._params, self._state, count)
        return self._state


def where_it_fits(cell: Row, measure: Callable[[], Sequence[Row]]) -> list[Row]:
    """The rows of a cell with what was measured there; the cell alone where the device has too little memory for it."""
    try:
        return [{**cell, **row} for row in measure()]
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
    return [cell]

"""The seconds of a round: some of them, run by `specjax.rollout.rounds.rounds` in one compiled program."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from launch.bench.models import Networks, compiled, random_prompts
from launch.bench.report import Row
from launch.timing import seconds, without_start
from specjax.drafters import Drafter
from specjax.keys import seed_step
from specjax.parallel.mesh import decoding_options
from specjax.rollout.admission import prefill, start_rows, zeros_like_result
from specjax.rollout.plan import RolloutConfig
from specjax.rollout.rounds import Decoding, RoundState, rounds
from specjax.types import Params, Prompts

STARTS = 5
NO_ROOM = "-: the device has too little memory for it"
Name = TypeVar("Name", bound=Hashable)


def seated(decoding: Decoding, prompts: Prompts, length: int) -> RoundState:
    """Rows at their first token, their caches of `length` positions blank: what a round costs does not hang on them."""
    kept = replace(zeros_like_result(lambda: prefill(decoding, prompts, jnp.bool_(True))), prompts=prompts)
    row = jnp.arange(len(prompts.lengths), dtype=jnp.int32)
    return start_rows(decoding, kept, row, row, seed_step(0, 0), length)


def some_rounds(decoding: Decoding, k: int, state: RoundState, count: Int[Array, ""]) -> RoundState:
    """`count` rounds at draft length k, from the first token of each row on."""
    one = jnp.ones_like(state.emitted)
    state = replace(state, emitted=one, done=one == 0)
    return rounds(decoding, state, k, lambda _, trips: trips == count)[0]


class Rounds(Generic[Name]):
    """Rounds of `rows` rows that see `context` positions each, in each of some ways: compiled when made.

    Every measurement starts at the same context, and the state, with room for `count` rounds at the longest draft, is
    donated from one to the next, so that the caches exist once and are as long in every way. What it takes to start a
    program, the least of some calls that run no round, is left out: of short rounds it is a good part.

    drafter: whose state it is.
    ways:    by name, who proposes (the drafter, or one that leaves its state alone) and how many tokens.
    options: XLA's, for these programs.
    """

    def __init__(
        self,
        networks: Networks,
        drafter: Drafter,
        rows: int,
        context: int,
        ways: Mapping[Name, tuple[Drafter, int]],
        count: int,
        options: dict[str, Any] | None = None,
    ) -> None:
        longest = max(k for _, k in ways.values())
        budget = count * (longest + 1) + 1
        config = RolloutConfig(group_size=1, max_new_tokens=budget, draft_length=longest)
        prompts = random_prompts(networks, rows, context)

        def first(params: Params) -> RoundState:
            decoding = Decoding(networks.policy, drafter, params, config)
            return seated(decoding, prompts, context + budget + config.slack)

        def some(drafter: Drafter, k: int, params: Params, state: RoundState, count: Int[Array, ""]) -> RoundState:
            return some_rounds(Decoding(networks.policy, drafter, params, config), k, state, count)

        self._params, self._count, self._none = networks.params, jnp.int32(count), jnp.int32(0)
        self._state = jax.jit(first, compiler_options=decoding_options(networks.policy.dtype))(networks.params)
        make = partial(compiled, networks, donate=(1,), options=options)
        parts = networks.params, self._state, self._none
        made = {name: make(partial(some, *way), *parts) for name, way in ways.items()}
        self._programs = {name: program for name, (program, _) in made.items()}
        self.compile_seconds = {name: taken for name, (_, taken) in made.items()}
        for name in ways:
            jax.block_until_ready(self._run(name, self._count))
        self._start = {name: min(seconds(partial(self._run, name, self._none)) for _ in range(STARTS)) for name in ways}

    def measure(self, name: Name) -> float:
        """The seconds of one round of that way."""
        return without_start(seconds(partial(self._run, name, self._count)), self._start[name]) / int(self._count)

    def _run(self, name: Name, count: Int[Array, ""]) -> RoundState:
        self._state = self._programs[name](self._params, self._state, count)
        return self._state


def where_it_fits(cell: Row, measure: Callable[[], Sequence[Row]]) -> list[Row]:
    """The rows of a cell with what was measured there; the cell alone where the device has too little memory for it."""
    try:
        return [{**cell, **row} for row in measure()]
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
    return [cell]

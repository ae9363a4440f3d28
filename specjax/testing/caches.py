"""Caches in the middle of a rollout, against those of a fresh prefill."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array

from specjax.drafters import Drafter
from specjax.drafters.base import DraftState
from specjax.drafters.head import HeadState
from specjax.keys import SeedStep, seed_step
from specjax.plan import RolloutConfig
from specjax.rollout import begin
from specjax.rounds import Decoding, RoundState, round_once
from specjax.types import Cache, Params, Policy, Prompts


def assert_cache_consistent(
    policy: Policy,
    drafter: Drafter,
    params: Params,
    prompts: Prompts,
    config: RolloutConfig,
    *,
    run: SeedStep | None = None,
    tolerance: float = 1e-4,
) -> list[RoundState]:
    """After the prefill and after each round, every row's caches hold what a prefill of its tokens so far would.

    All sequences are decoded at once, at `config.draft_length`; `CacheCheck` says what is compared. Nothing is tested
    by chance. Returns the states, in numpy. Raises AssertionError at the first that is off.
    """
    check = CacheCheck(policy, drafter, params, prompts, config, tolerance)
    rows, run = len(prompts.lengths) * config.group_size, seed_step(0, 0) if run is None else run

    @jax.jit
    def first(params: Params, prompts: Prompts, run: SeedStep) -> RoundState:
        return begin(Decoding(policy, drafter, params, config), prompts, run, rows).state

    @jax.jit
    def advance(params: Params, state: RoundState) -> RoundState:
        return round_once(Decoding(policy, drafter, params, config), state, config.draft_length)

    states = [check(first(params, prompts, run))]
    while not states[-1].done.all():
        states.append(check(advance(params, states[-1])))
    return states


@dataclass(frozen=True)
class CacheCheck:
    """Compares the caches of a state with those of one fresh pass over each row's committed tokens, of live rows.

    The policy's, up to the visible length. The drafter's, where its state has fields `cache` and `length` [B] (and
    maybe `first` [B]): what `Drafter.start` makes of the same tokens, between the two. Of a HeadDrafter also what waits
    to be cached: the true features and next tokens of the positions from `length` up to the visible length.
    """

    policy: Policy
    drafter: Drafter
    params: Params
    prompts: Prompts
    config: RolloutConfig
    tolerance: float = 1e-4

    def __call__(self, state: RoundState) -> RoundState:
        """The state in numpy. Raises AssertionError."""
        state = jax.tree.map(np.asarray, state)
        tokens = self._committed(state)
        cache, draft, features = self._prefill(tokens)
        own = state.draft
        for row in map(int, np.flatnonzero(~state.done)):
            visible = int(state.prompt[row] + state.emitted[row]) - 1
            self._same(state.cache, cache, row, 0, visible, "policy")
            if hasattr(own, "cache"):
                first = int(own.first[row]) if hasattr(own, "first") else 0
                self._same(own.cache, draft.cache, row, first, int(own.length[row]), "draft")
            if isinstance(own, HeadState):
                at, count, where = int(own.length[row]), int(own.waiting[row]), f"row {row}, the draft's"
                if at + count != visible:
                    raise AssertionError(f"{where} {at} cached and {count} waiting positions: {visible} are visible")
                self._close(own.features[row, :count], features[row, at : at + count], f"{where} features")
                self._close(own.tokens[row, :count], tokens[row, at + 1 : at + count + 1], f"{where} tokens")
        return state

    def _committed(self, state: RoundState) -> np.ndarray:
        """Prompt and emitted tokens of each row, zeros after; rows for all sequences."""
        prompts, width = np.asarray(self.prompts.tokens), self.prompts.tokens.shape[1]
        rows = np.zeros((len(prompts) * self.config.group_size, width + self.config.max_new_tokens), np.int32)
        for row, prompt, count, sequence, new in zip(
            rows, state.prompt, state.emitted, state.sequence, state.tokens, strict=False
        ):
            row[:prompt] = prompts[sequence // self.config.group_size, :prompt]
            row[prompt : prompt + count] = new[:count]
        return rows

    @cached_property
    def _prefill(self) -> Callable[[np.ndarray], tuple[Cache, DraftState, Array]]:
        @jax.jit
        def fresh(params: Params, tokens: Array) -> tuple[Cache | None, DraftState, Array]:
            rows, length = tokens.shape
            zeros = jnp.zeros(rows, jnp.int32)
            output = self.policy.apply(params.policy, tokens, zeros, self.policy.init_cache(rows, length))
            features = self.drafter.reads(output)
            start = self.drafter.start(params, Prompts(tokens, jnp.full(rows, length), zeros), features, 1)
            return output.cache, start, features

        return lambda tokens: jax.tree.map(np.asarray, fresh(self.params, tokens))

    def _same(self, got: Cache, expected: Cache, row: int, first: int, until: int, whose: str) -> None:
        for number, layers in enumerate(zip(got, expected, strict=True)):
            for name in ("k", "v"):
                mine, fresh = (getattr(layer, name)[row, :, first:until] for layer in layers)
                self._close(mine, fresh, f"row {row}, {whose} cache {number}: {name} of {first} .. {until - 1}")

    def _close(self, got: ArrayLike, expected: ArrayLike, what: str) -> None:
        np.testing.assert_allclose(got, expected, atol=self.tolerance, rtol=0, err_msg=what)

"""Comparison of the caches during a rollout with those of a fresh prefill."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array

from specjax.adapters import joined
from specjax.drafters import Drafter
from specjax.drafters.base import DraftState
from specjax.drafters.head import HeadState
from specjax.drafters.history import HistoryState
from specjax.drafters.lookup import Text
from specjax.drafters.lookup_beside_head import PairState
from specjax.keys import SeedStep, seed_step
from specjax.parallel import processes
from specjax.rollout.plan import RolloutConfig
from specjax.rollout.rounds import Decoding, RoundState, round_once
from specjax.rollout.speculative import start_rollout
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
    """Assert that after the prefill and after each round, every row's caches equal those of a prefill of its tokens.

    All sequences are decoded at once, at `config.draft_length`. `CacheCheck` describes what is compared. The test is
    deterministic. Returns the states, as numpy. Raises AssertionError at the first difference, and ValueError for a
    drafter whose state cannot be compared.
    """
    params = joined(params)
    check = CacheCheck(policy, drafter, params, prompts, config, tolerance)
    rows, run = len(prompts.lengths) * config.group_size, seed_step(0, 0) if run is None else run

    @jax.jit
    def start(params: Params, prompts: Prompts, run: SeedStep) -> RoundState:
        return start_rollout(Decoding(policy, drafter, params, config), prompts, run, rows).state

    @jax.jit
    def advance(params: Params, state: RoundState) -> RoundState:
        return round_once(Decoding(policy, drafter, params, config), state, config.draft_length)

    states = [check(start(params, prompts, run))]
    while not states[-1].done.all():
        states.append(check(advance(params, states[-1])))
    return states


@dataclass(frozen=True)
class CacheCheck:
    """Compares the caches of live rows with those of one fresh pass over each row's committed tokens.

    The policy's cache is compared up to the visible length. The drafter's state, or both parts of a pair:

    - with fields `cache` and `length` [B] (and maybe `visible_from` [B]): what `Drafter.start` makes of the same
      tokens, between the two. Of a HeadDrafter also what waits to be cached: the true features and next tokens of the
      positions from `length` up to the visible length;
    - of a lookup: its text, which must be all committed tokens and nothing else;
    - without any arrays, as for NoDrafter or at draft length 0: nothing.

    Any other state raises ValueError, since there is nothing to compare it with.

    Attributes:
        tolerance: Largest difference allowed.
        relative:  The same as a share of the largest entry of each array; added to `tolerance`.
    """

    policy: Policy
    drafter: Drafter
    params: Params
    prompts: Prompts
    config: RolloutConfig
    tolerance: float = 1e-4
    relative: float = 0.0

    def __call__(self, state: RoundState) -> RoundState:
        """Return the state as numpy. Raise AssertionError if it differs, ValueError if it cannot be compared."""
        state = processes.fetch(state)
        tokens = self._committed(state)
        cache, draft, features = self._prefill(tokens)
        parts = _parts(state.draft, draft)
        for row in map(int, np.flatnonzero(~state.done)):
            visible = int(state.prompt[row] + state.emitted[row]) - 1
            self._same(state.cache, cache, row, 0, visible, "policy")
            for own, fresh in parts:
                if isinstance(own, Text):
                    self._same_text(own, tokens[row, : visible + 1], row)
                    continue
                first = int(own.visible_from[row]) if hasattr(own, "visible_from") else 0
                self._same(own.cache, fresh.cache, row, first, int(own.length[row]), "draft")
                if isinstance(own, HeadState):
                    self._same_waiting(own, features[row], tokens[row], row, visible)
        return state

    def _same_text(self, own: Text, tokens: np.ndarray, row: int) -> None:
        where, text = f"row {row}, the draft's text", own.cache.tokens[row]
        if int(own.length[row]) != len(tokens):
            raise AssertionError(f"{where} is {own.length[row]} tokens long: {len(tokens)} are committed")
        self._close(text, np.pad(tokens + 1, (0, len(text) - len(tokens))), where)

    def _same_waiting(self, own: HeadState, features: np.ndarray, tokens: np.ndarray, row: int, visible: int) -> None:
        at, count, where = int(own.length[row]), int(own.waiting[row]), f"row {row}, the draft's"
        if at + count != visible:
            raise AssertionError(f"{where} {at} cached and {count} waiting positions: {visible} are visible")
        self._close(own.features[row, :count], features[at : at + count], f"{where} features")
        self._close(own.tokens[row, :count], tokens[at + 1 : at + count + 1], f"{where} tokens")

    def _committed(self, state: RoundState) -> np.ndarray:
        """Return prompt and emitted tokens of each row, then zeros; rows for all sequences."""
        prompts, width = processes.fetch(self.prompts.tokens), self.prompts.tokens.shape[1]
        rows = np.zeros((len(prompts) * self.config.group_size, width + self.config.max_new_tokens), np.int32)
        for row, prompt, count, sequence, new in zip(
            rows, state.prompt, state.emitted, state.sequence, state.tokens, strict=False
        ):
            row[:prompt] = prompts[sequence // self.config.group_size, :prompt]
            row[prompt : prompt + count] = new[:count]
        return rows

    @cached_property
    def _prefill(self) -> Callable[[np.ndarray], tuple[Cache, DraftState, np.ndarray]]:
        @jax.jit
        def fresh(params: Params, tokens: Array) -> tuple[Cache | None, DraftState, Array]:
            rows, length = tokens.shape
            zeros = jnp.zeros(rows, jnp.int32)
            output = self.policy.apply(params.policy, tokens, zeros, self.policy.init_cache(rows, length))
            features = self.drafter.features(output)
            start = self.drafter.start(params, Prompts(tokens, jnp.full(rows, length), zeros), features, 1)
            return output.cache, start, features

        return lambda tokens: processes.fetch(fresh(self.params, tokens))

    def _same(self, got: Cache, expected: Cache, row: int, first: int, until: int, whose: str) -> None:
        for number, layers in enumerate(zip(got, expected, strict=True)):
            for name in ("k", "v"):
                mine, fresh = (getattr(layer, name)[row, :, first:until] for layer in layers)
                self._close(mine, fresh, f"row {row}, {whose} cache {number}: {name} of {first} .. {until - 1}")

    def _close(self, got: ArrayLike, expected: ArrayLike, what: str) -> None:
        found, wanted = (x.astype(np.float32) for x in processes.fetch((got, expected)))
        if found.shape != wanted.shape:
            raise AssertionError(f"{what}: of shape {found.shape}, must be {wanted.shape}")
        allowed = self.tolerance + self.relative * np.abs(wanted).max(initial=0)
        difference = np.abs(found - wanted).max(initial=0)
        # Also false for NaN.
        if not difference <= allowed:
            raise AssertionError(f"{what}: differ by up to {difference:.3g} (allowed: {allowed:.3g})")


def _parts(own: DraftState, fresh: DraftState) -> list[tuple[DraftState, DraftState]]:
    """Return the comparable parts of a drafter's state, each paired with that of a fresh prefill."""
    if not jax.tree.leaves(own):
        return []
    match own:
        case Text():
            return [(own, fresh)]
        case HistoryState():
            return [(own.own, fresh.own)]
        case PairState():
            return _parts(own.lookup, fresh.lookup) + _parts(own.trained, fresh.trained)
    if hasattr(own, "cache") and hasattr(own, "length"):
        return [(own, fresh)]
    raise ValueError(f"draft state of type {type(own).__name__}: has no cache and no text to compare with a prefill's")

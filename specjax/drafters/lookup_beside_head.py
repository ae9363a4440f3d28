"""A lookup combined with a trained draft: the lookup's proposal where it has one, the trained draft's elsewhere."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from specjax.drafters.base import Anchors, Drafter, DraftLoss, DraftState, Flag, Memory, Proposal
from specjax.sampling import SamplingLaw
from specjax.types import Cache, EightBit, Params, PolicyOutput, Prompts


class PairState(NamedTuple):
    """States of both drafters."""

    lookup: DraftState
    trained: DraftState


@dataclass(frozen=True)
class EitherDrafter(Drafter):
    """Drafts with a lookup where it finds a match, and with a trained drafter elsewhere.

    The choice is made for each row before any sampled token is looked at, so the law is kept. Both drafters observe
    every verification. Features, parameters and loss are the trained drafter's, the memory is the lookup's.

    lookup: a drafter whose proposals, lengths included, are a function of the committed tokens. Its shortest match
            (min_n) decides when it is preferred.
    """

    lookup: Drafter
    trained: Drafter

    @property
    def memory(self) -> Memory | None:
        return self.lookup.memory

    @property
    def stride(self) -> int:
        return self.trained.stride

    @property
    def eight_bit(self) -> EightBit | None:
        return self.trained.eight_bit

    def init_cache(self, rows: int, length: int, width: int) -> Cache:
        return self.trained.init_cache(rows, length, width)

    def features(self, output: PolicyOutput) -> Array:
        return self.trained.features(output)

    def loss(
        self,
        params: Params,
        tokens: Array,
        output: PolicyOutput,
        mask: Array,
        law: SamplingLaw,
        anchors: Anchors | None = None,
    ) -> DraftLoss:
        return self.trained.loss(params, tokens, output, mask, law, anchors)

    def start(self, params: Params, prompts: Prompts, features: Array, width: int, drafting: Flag = True) -> PairState:
        both = (drafter.start(params, prompts, features, width, drafting) for drafter in (self.lookup, self.trained))
        return PairState(*both)

    def observe(self, state: PairState, features: Array, tokens: Array, emitted: Array) -> PairState:
        return self._both(state, lambda drafter, own_state: drafter.observe(own_state, features, tokens, emitted))

    def append(
        self, params: Params, state: PairState, features: Array, tokens: Array, count: Array, visible: Array
    ) -> PairState:
        return self._both(state, lambda drafter, own: drafter.append(params, own, features, tokens, count, visible))

    def observe_finished(self, state: PairState, prompts: Prompts, finished: Array) -> PairState:
        return self._both(state, lambda drafter, own_state: drafter.observe_finished(own_state, prompts, finished))

    def catch_up(self, state: PairState, visible: Array, tokens: Array, emitted: Array) -> PairState:
        return self._both(state, lambda drafter, own_state: drafter.catch_up(own_state, visible, tokens, emitted))

    def propose(self, params: Params, state: PairState, gumbel: Array, law: SamplingLaw) -> tuple[Proposal, PairState]:
        from_lookup, lookup = self.lookup.propose(params, state.lookup, gumbel, law)
        drafted, trained = self.trained.propose(params, state.trained, gumbel, law)
        return found_or_drafted(from_lookup, drafted), PairState(lookup, trained)

    def _both(self, state: PairState, update: Callable[[Drafter, DraftState], DraftState]) -> PairState:
        return PairState(update(self.lookup, state.lookup), update(self.trained, state.trained))


def found_or_drafted(from_lookup: Proposal, drafted: Proposal) -> Proposal:
    """Return for each row the proposal found, or the one drafted if nothing was found.

    Each keeps the law it was drawn from. `predicted` is True only in rows that were drafted.
    """
    use = from_lookup.length > 0

    def choose(one: Array, other: Array) -> Array:
        return jnp.where(use.reshape(-1, *(1,) * (one.ndim - 1)), one, other)

    tokens, log_q, length = map(choose, from_lookup[:3], drafted[:3])
    predicted = ~use if drafted.predicted is None else ~use & drafted.predicted
    return Proposal(tokens, log_q, length, predicted)

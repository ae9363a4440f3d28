"""A lookup and a trained draft together: the lookup's proposal where it has one, the trained draft's elsewhere."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array

from specjax.drafters.base import Drafter, DraftLoss, DraftState, Proposal
from specjax.sampling import SamplingLaw
from specjax.types import Params, PolicyOutput, Prompts, PyTree, Rollout


@dataclass(frozen=True)
class EitherDrafter(Drafter):
    """Chooses for each row before a sampled token is looked at, which is what keeps the law.

    Each proposal is verified with the law it was drawn from: one-hot for the lookup's, the trained draft's own for the
    other. Both see every verification; parameters, features and loss are the trained one's, the memory the lookup's.
    What training foretells is held against the trained draft's own proposals.

    lookup: a drafter whose proposals, lengths included, are a function of what is committed. The length that it asks of
            a match (min_n) is what a lookup must offer to be preferred.
    """

    lookup: Drafter
    trained: Drafter

    def features(self, output: PolicyOutput) -> Array:
        return self.trained.features(output)

    def blank_memory(self, prompts: int, max_new_tokens: int) -> PyTree:
        return self.lookup.blank_memory(prompts, max_new_tokens)

    def start(self, params: Params, prompts: Prompts, features: Array, width: int) -> tuple[DraftState, DraftState]:
        return tuple(drafter.start(params, prompts, features, width) for drafter in (self.lookup, self.trained))

    def start_without_drafting(
        self, params: Params, prompts: Prompts, blank: tuple[DraftState, DraftState]
    ) -> tuple[DraftState, DraftState]:
        lookup, trained = blank
        return self.lookup.start_without_drafting(params, prompts, lookup), self.trained.start_without_drafting(
            params, prompts, trained
        )

    def observe_finished(
        self, state: tuple[DraftState, DraftState], prompts: Prompts, finished: Array
    ) -> tuple[DraftState, DraftState]:
        return self.lookup.observe_finished(state[0], prompts, finished), self.trained.observe_finished(
            state[1], prompts, finished
        )

    def catch_up(
        self, state: tuple[DraftState, DraftState], visible: Array, tokens: Array, emitted: Array
    ) -> tuple[DraftState, DraftState]:
        lookup, trained = state
        lookup = self.lookup.catch_up(lookup, visible, tokens, emitted)
        return lookup, self.trained.catch_up(trained, visible, tokens, emitted)

    def known_from(self, state: tuple[DraftState, DraftState]) -> Array | None:
        return self.trained.known_from(state[1])

    def propose(
        self, params: Params, state: tuple[DraftState, DraftState], gumbel: Array, law: SamplingLaw
    ) -> tuple[Proposal, tuple[DraftState, DraftState]]:
        looked_up, lookup_state = self.lookup.propose(params, state[0], gumbel, law)
        drafted, trained_state = self.trained.propose(params, state[1], gumbel, law)
        found = looked_up.length > 0

        def choose(one: Array, other: Array) -> Array:
            return jnp.where(found.reshape(-1, *(1,) * (one.ndim - 1)), one, other)

        tokens, log_q, length = map(choose, looked_up[:3], drafted[:3])
        predicted = ~found if drafted.predicted is None else ~found & drafted.predicted
        return Proposal(tokens, log_q, length, predicted), (lookup_state, trained_state)

    def observe(
        self, state: tuple[DraftState, DraftState], features: Array, tokens: Array, emitted: Array
    ) -> tuple[DraftState, DraftState]:
        lookup, trained = state
        lookup = self.lookup.observe(lookup, features, tokens, emitted)
        return lookup, self.trained.observe(trained, features, tokens, emitted)

    def loss(self, params: Params, tokens: Array, output: PolicyOutput, mask: Array, law: SamplingLaw) -> DraftLoss:
        return self.trained.loss(params, tokens, output, mask, law)

    def remember(self, memory: PyTree, prompts: Prompts, rollout: Rollout) -> PyTree:
        return self.lookup.remember(memory, prompts, rollout)

"""Acceptance of a lookup drafter, counted after the rollout on the completions.

The loss of a trained draft predicts its acceptance. A lookup has no loss, but its proposals are functions of the text
before them, and a proposed token is accepted as often as the policy draws that very token. So its proposals
are compared with the tokens that the policy drew.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from specjax.rollout.rounds import Decoding, RoundState
from specjax.types import Writer

PLACES_PER_ROW = 16
# Most tokens in all rows times places processed in parallel: bounds the memory.
MAX_TOKENS_AT_ONCE = 2**18


def count_lookup_acceptance(decoding: Decoding, state: RoundState) -> Int[Array, "2 K"]:
    """Return how often position i of a draft could have been emitted, and how often it would have been accepted.

    Counted like `Rollout.drafted` and `Rollout.accepted`, over the rows still in their slots, at up to PLACES_PER_ROW
    evenly spread places of each completion. A place where the lookup finds nothing counts as rejected.
    """
    drafter, config, longest = decoding.drafter, decoding.config, max(decoding.config.lengths)
    zeros = jnp.zeros((len(state.done), longest, decoding.policy.vocab_size), jnp.float32)

    def at(number: Array) -> Array:
        known = 1 + number * jnp.maximum(state.emitted - 1, PLACES_PER_ROW) // PLACES_PER_ROW
        draft = drafter.catch_up(state.draft, state.prompt + known - 1, state.tokens, known)
        proposal, _ = drafter.propose(decoding.params, draft, zeros, config.law)
        position = jnp.arange(longest)[None]
        drafted = known[:, None] + position < state.emitted[:, None]
        if state.turns is not None:
            writer = jnp.take_along_axis(state.writer, known[:, None] + position, axis=1, mode="clip")
            drafted &= writer != Writer.ENVIRONMENT
        drawn = jnp.take_along_axis(state.tokens, known[:, None] + position, axis=1, mode="clip")
        equal = (position < proposal.length[:, None]) & (proposal.tokens == drawn)
        accepted = drafted & (jnp.cumprod(equal, axis=1) > 0)
        return jnp.stack([jnp.sum(x, axis=0, dtype=jnp.int32) for x in (drafted, accepted)])

    together = min(max(MAX_TOKENS_AT_ONCE // state.tokens.size, 1), PLACES_PER_ROW)
    return jnp.sum(jax.lax.map(at, jnp.arange(PLACES_PER_ROW, dtype=jnp.int32), batch_size=together), axis=0)

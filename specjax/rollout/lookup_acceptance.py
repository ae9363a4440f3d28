"""The acceptance of a lookup, counted after the rollout on the completions themselves.

A trained draft's loss predicts its acceptance. A lookup has no loss, but its proposals are functions of the text before
them, and a proposed token is accepted as often as the policy draws that very token: so compare them with what came.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from specjax.rollout.rounds import Decoding, RoundState

PLACES_PER_ROW = 16
# Completion tokens of the rows times places looked at side by side: what bounds the memory.
MAX_TOKENS_AT_ONCE = 2**18


def count_lookup_acceptance(decoding: Decoding, state: RoundState) -> Int[Array, "2 K"]:
    """Return how often position i of a draft could have been emitted, and how often it would have been accepted.

    Counted like `Rollout.drafted` and `Rollout.accepted`, at up to 16 places of each row's completion, spread evenly:
    of the rows still in their slots. A place at which nothing is found counts as refused.
    """
    drafter, config, longest = decoding.drafter, decoding.config, max(decoding.config.lengths)
    zeros = jnp.zeros((len(state.done), longest, decoding.policy.vocab_size), jnp.float32)

    def at(number: Array) -> Array:
        known = 1 + number * jnp.maximum(state.emitted - 1, PLACES_PER_ROW) // PLACES_PER_ROW
        draft = drafter.catch_up(state.draft, state.prompt + known - 1, state.tokens, known)
        proposal, _ = drafter.propose(decoding.params, draft, zeros, config.law)
        position = jnp.arange(longest)[None]
        asked = known[:, None] + position < state.emitted[:, None]
        came = jnp.take_along_axis(state.tokens, known[:, None] + position, axis=1, mode="clip")
        right = (position < proposal.length[:, None]) & (proposal.tokens == came)
        kept = asked & (jnp.cumprod(right, axis=1) > 0)
        return jnp.stack([jnp.sum(x, axis=0, dtype=jnp.int32) for x in (asked, kept)])

    together = min(max(MAX_TOKENS_AT_ONCE // state.tokens.size, 1), PLACES_PER_ROW)
    return jnp.sum(jax.lax.map(at, jnp.arange(PLACES_PER_ROW, dtype=jnp.int32), batch_size=together), axis=0)

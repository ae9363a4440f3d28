"""What a drafter without parameters would have proposed of what has been written.

A draft that learns foretells its acceptance by its loss. One that looks up has none, but needs nothing run to be
judged: its proposals are functions of the text before them, and one of them is accepted as often as the policy would
have drawn that very token.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from specjax.rounds import Decoding, RoundState

PLACES = 16


def in_hindsight(decoding: Decoding, state: RoundState) -> Int[Array, "2"]:
    """At how many places of the rows' completions the next token would have been proposed, and of how many places.

    The places, up to 16 a row, lie evenly between its first token and its last.
    """
    drafter, config = decoding.drafter, decoding.config
    none = jnp.zeros((len(state.done), 1, decoding.policy.vocab_size), jnp.float32)

    def at(number: Array) -> Array:
        known = 1 + number * (state.emitted - 1) // PLACES
        counts = known < state.emitted
        draft = drafter.align(state.draft, state.prompt + known - 1, state.tokens, known)
        proposal, _ = drafter.propose(decoding.params, draft, none, config.law)
        came = jnp.take_along_axis(state.tokens, known[:, None], axis=1)
        hit = counts & (proposal.length > 0) & (proposal.tokens == came)[:, 0]
        return jnp.stack([jnp.sum(hit, dtype=jnp.int32), jnp.sum(counts, dtype=jnp.int32)])

    return jnp.sum(jax.lax.map(at, jnp.arange(PLACES, dtype=jnp.int32)), axis=0)

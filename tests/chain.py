"""A Markov chain as a policy. It compiles fast, and its logits determine how often it repeats itself."""

import jax.numpy as jnp
from jaxtyping import Array

from specjax import cache as kv
from specjax.types import Cache, Policy, PolicyOutput


def chain(vocab: int) -> Policy:
    """Return a policy without features. Its parameters, float32 [V, V], are the logits of the next token."""

    def apply(
        params: Array,
        tokens: Array,
        start: Array,
        cache: Cache | None = None,
        logits_at: Array | None = None,
        first: Array | None = None,
    ) -> PolicyOutput:
        none = jnp.zeros((*tokens.shape, 0))
        read = tokens if logits_at is None else jnp.take_along_axis(tokens, logits_at[:, None], axis=1)
        # The hidden states are the logits.
        return PolicyOutput(params[read], none, params[tokens], cache)

    return Policy(
        apply=apply,
        init_cache=lambda rows, length: (kv.empty(rows, length, 1, 1, jnp.dtype(jnp.float32)),),
        embedding=lambda params: params,
        unembed=lambda params, hidden: hidden,
        vocab_size=vocab,
        dtype=jnp.dtype(jnp.float32),
    )


COUNTING = jnp.array([[0, 3, 0, 0, -9], [0, 0, 3, 0, -9], [0, 0, 0, 3, -9], [3, 0, 1, 0, 1], [0] * 5], jnp.float32)
"""Logits of a chain that mostly counts from 0 to 3 and starts again; after 3 it may say 4."""

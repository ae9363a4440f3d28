"""Attention written out, with all scores, in the dtype of its arguments."""

import jax
import jax.numpy as jnp
import numpy as np


def attend_dense(q: jax.Array, k: jax.Array, v: jax.Array, mask: np.ndarray) -> jax.Array:
    """Attend from q [B, N, heads, H] to k and v [B, S, G, H] by a mask [N, S]."""
    groups = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
    scores = jnp.einsum("bqnh,bsnh->bnqs", q, k) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(jnp.asarray(mask)[None, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bnqs,bsnh->bqnh", weights, v)

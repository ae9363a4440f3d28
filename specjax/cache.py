"""The key-value cache of one layer: [slot, length, kv_head, head_dim] each for keys and values.

A row's visible length is kept by its owner. Roll-back is setting it lower: what lies beyond is garbage that no token
attends to and that later writes replace.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.types import LayerCache


def empty(slots: int, length: int, kv_heads: int, head_dim: int, dtype: jnp.dtype) -> LayerCache:
    """A cache of zeros."""
    zeros = jnp.zeros((slots, length, kv_heads, head_dim), dtype)
    return LayerCache(zeros, zeros)


def write(
    cache: LayerCache, k: Float[Array, "B T G H"], v: Float[Array, "B T G H"], start: Int[Array, "B"]
) -> LayerCache:
    """Row b gets its T new positions at start[b]. The caller leaves slack: a write past the end would be clamped.

    The vmapped update keeps a sharded slot axis local; `.at[rows, columns].set` gathers it.
    """
    put = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice_in_dim(row, new, at, axis=0))
    return LayerCache(put(cache.k, k.astype(cache.k.dtype), start), put(cache.v, v.astype(cache.v.dtype), start))


def positions(start: Int[Array, "B"], count: int) -> Int[Array, "B T"]:
    """start[b], start[b] + 1, .. for each row."""
    return start[:, None] + jnp.arange(count)[None]


def causal_mask(start: Int[Array, "B"], queries: int, keys: int) -> Bool[Array, "B T S"]:
    """Which of the first `keys` cached positions each of the tokens at start .. start + queries - 1 may attend to."""
    return jnp.arange(keys)[None, None] <= positions(start, queries)[..., None]

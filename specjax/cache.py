"""The key-value cache of one layer: [slot, length, kv_head, head_dim] each for keys and values.

A row's visible length is kept by its owner. Roll-back is setting it lower: what lies beyond is garbage that no token
attends to and that later writes replace.
"""

from typing import NamedTuple

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


class View(NamedTuple):
    """Where the T tokens of a forward sit, and what each of them attends to.

    positions: int32 [B, T], for the rotary embedding.
    write:     int32 [B], the cache index of the first; None without a cache.
    mask:      bool [B, T, window], over the first `window` cached positions; None for the earlier tokens of its row.
    """

    positions: Int[Array, "B T"]
    write: Int[Array, "B"] | None = None
    mask: Bool[Array, "B T W"] | None = None


def decode_view(start: Int[Array, "B"], count: int, window: int) -> View:
    """Tokens at start .. start + count - 1, each attending to the cached positions up to its own."""
    positions = _positions(start, count)
    return View(positions, start, jnp.arange(window)[None, None] <= positions[..., None])


def uncached_view(start: Int[Array, "B"], count: int) -> View:
    """The same tokens without a cache, attending to one another causally."""
    return View(_positions(start, count))


def unrolled_view(rows: int, count: int, depth: int) -> View:
    """Pass `depth` of EAGLE-3's training-time test (arXiv 2503.01840, section 3.2) over whole rows of `count` tokens.

    The cache holds the keys of every pass behind one another. A query attends causally to those of pass 0, which come
    from true features, and to those of the later passes at its own index alone, as it would when decoding.
    """
    index = jnp.arange(count)
    column = jnp.arange((depth + 1) * count)
    causal = column[None] <= index[:, None]
    diagonal = (column[None] >= count) & (column[None] % count == index[:, None])
    return View(
        positions=jnp.tile(index[None] + depth, (rows, 1)),
        write=jnp.full(rows, depth * count, jnp.int32),
        mask=jnp.tile((causal | diagonal)[None], (rows, 1, 1)),
    )


def _positions(start: Array, count: int) -> Array:
    return start[:, None] + jnp.arange(count)[None]

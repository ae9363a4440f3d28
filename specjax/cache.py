"""The key-value cache of one layer: [slot, kv_head, length, head_dim] each for keys and values.

Heads stand before positions, the order that a batched matmul over (slot, head) reads without moving anything.

A row's visible length is kept by its owner. Roll-back is setting it lower: what lies beyond is garbage that no token
attends to and that later writes replace.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.types import LayerCache, PyTree


def empty(slots: int, length: int, kv_heads: int, head_dim: int, dtype: jnp.dtype) -> LayerCache:
    """A cache of zeros."""
    zeros = jnp.zeros((slots, kv_heads, length, head_dim), dtype)
    return LayerCache(zeros, zeros)


def write(
    cache: LayerCache, k: Float[Array, "B T G H"], v: Float[Array, "B T G H"], start: Int[Array, "B"]
) -> LayerCache:
    """Row b gets its T new positions at start[b]. The caller leaves slack: a write past the end would be clamped.

    The vmapped update keeps a sharded slot axis local; `.at[rows, columns].set` gathers it.
    """

    def put(into: Array, new: Array) -> Array:
        new = jnp.swapaxes(new, 1, 2).astype(into.dtype)
        return jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice_in_dim(row, new, at, axis=1))(
            into, new, start
        )

    return LayerCache(put(cache.k, k), put(cache.v, v))


def attend(q: Float[Array, "B T N H"], cache: LayerCache, mask: Bool[Array, "B T S"]) -> Float[Array, "B T N H"]:
    """Grouped-query attention over the cached positions that `mask` allows; N is a multiple of the kv heads.

    The queries of a group share one matmul with their keys, which are never repeated. Scores and softmax are float32.
    """
    rows, count, heads, size = q.shape
    groups = heads // cache.k.shape[1]
    q = jnp.moveaxis(q.reshape(rows, count, -1, groups, size), 1, 3).reshape(rows, -1, groups * count, size)
    scores = jnp.einsum("bkqh,bksh->bkqs", q, cache.k, preferred_element_type=jnp.float32) * size**-0.5
    allowed = jnp.tile(mask, (1, groups, 1))[:, None]
    weights = jax.nn.softmax(jnp.where(allowed, scores, jnp.finfo(jnp.float32).min), axis=-1).astype(cache.v.dtype)
    y = jnp.einsum("bkqs,bksh->bkqh", weights, cache.v)
    return jnp.moveaxis(y.reshape(rows, -1, groups, count, size), 3, 1).reshape(rows, count, heads, size)


def resize(tree: PyTree, by: int) -> PyTree:
    """Every cache in the tree with room for so many more positions, or fewer: the first are kept, new ones zero."""

    def one(x: Array) -> Array:
        return jnp.pad(x, ((0, 0), (0, 0), (0, by), (0, 0))) if by > 0 else x[:, :, : x.shape[2] + by]

    def layer(x: PyTree) -> PyTree:
        return LayerCache(one(x.k), one(x.v)) if isinstance(x, LayerCache) else x

    return jax.tree.map(layer, tree, is_leaf=lambda x: isinstance(x, LayerCache))


class View(NamedTuple):
    """Where the T tokens of a forward sit, and what each of them attends to.

    positions: int32 [B, T], for the rotary embedding.
    write:     int32 [B], the cache index of the first; None without a cache.
    mask:      bool [B, T, S], over the cached positions; None for the earlier tokens of its row.
    """

    positions: Int[Array, "B T"]
    write: Int[Array, "B"] | None = None
    mask: Bool[Array, "B T S"] | None = None


def decode_view(start: Int[Array, "B"], count: int, length: int, first: Int[Array, "B"] | None = None) -> View:
    """Tokens at start .. start + count - 1, each attending to the positions up to its own of a cache of `length`.

    first: where a row's visible positions begin; None for 0.
    """
    positions, index = _positions(start, count), jnp.arange(length)[None, None]
    mask = index <= positions[..., None]
    return View(positions, start, mask if first is None else mask & (index >= first[:, None, None]))


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

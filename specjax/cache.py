"""The key-value cache of one layer: [slot, kv_head, length, head_dim] each for keys and values.

Heads stand before positions, the order that a batched matmul over (slot, head) reads without moving anything.

A row's visible length is kept by its owner. Roll-back is setting it lower: what lies beyond is garbage that no token
attends to and that later writes replace.
"""

from dataclasses import field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from specjax import kernels
from specjax.types import LayerCache, PyTree, TextCache, pytree


def empty(slots: int, length: int, kv_heads: int, head_dim: int, dtype: jnp.dtype) -> LayerCache:
    """A cache of zeros."""
    zeros = jnp.zeros((slots, kv_heads, length, head_dim), dtype)
    return LayerCache(zeros, zeros)


def write(
    cache: LayerCache, k: Float[Array, "B T G H"], v: Float[Array, "B T G H"], start: Int[Array, "B"]
) -> LayerCache:
    """Row b gets its T new positions at start[b]. The caller leaves slack: a write past the end would be clamped."""

    def put(into: Array, new: Array) -> Array:
        return kernels.write(into, jnp.swapaxes(new, 1, 2).astype(into.dtype), start)

    return LayerCache(put(cache.k, k), put(cache.v, v))


def resize(tree: PyTree, by: int) -> PyTree:
    """Every cache in the tree with room for so many more positions, or fewer: the first are kept, new ones zero."""

    def one(x: Array, axis: int) -> Array:
        if by <= 0:
            return jax.lax.slice_in_dim(x, 0, x.shape[axis] + by, axis=axis)
        return jnp.pad(x, [(0, by if i == axis else 0) for i in range(x.ndim)])

    def resized(x: PyTree) -> PyTree:
        match x:
            case LayerCache(k, v):
                return LayerCache(one(k, 2), one(v, 2))
            case TextCache(tokens):
                return TextCache(one(tokens, 1))
        return x

    return jax.tree.map(resized, tree, is_leaf=lambda x: isinstance(x, LayerCache | TextCache))


@pytree
class View:
    """Where the T tokens of a forward sit, and what each of them attends to.

    positions: int32 [B, T], for the rotary embedding.
    write:     int32 [B], the cache index of the first; None without a cache.
    mask:      bool [B, T, S], over the cached positions; None for the earlier tokens of its row, or with a cache for
               what specjax.drafters.training_time_test says.
    window:    without a mask, how many of the last positions, its own included; None for all. Static.
    """

    positions: Int[Array, "B T"]
    write: Int[Array, "B"] | None = None
    mask: Bool[Array, "B T S"] | None = None
    window: int | None = field(default=None, metadata={"static": True})


def token_at(x: Shaped[Array, "B T D"], index: Int[Array, "B"]) -> Shaped[Array, "B 1 D"]:
    """Return x at token `index` of each row."""
    return jnp.take_along_axis(x, index[:, None, None], axis=1)


def decode_view(
    start: Int[Array, "B"],
    count: int,
    length: int,
    visible_from: Int[Array, "B"] | None = None,
    window: int | None = None,
) -> View:
    """Tokens at start .. start + count - 1, each attending to the positions up to its own of a cache of `length`.

    visible_from: where a row's visible positions begin; None for 0.
    window: to how many of the last ones, its own included.
    """
    positions, index = _positions(start, count), jnp.arange(length)[None, None]
    mask = index <= positions[..., None]
    if visible_from is not None:
        mask &= index >= visible_from[:, None, None]
    if window is not None:
        mask &= index > positions[..., None] - window
    return View(positions, start, mask)


def uncached_view(start: Int[Array, "B"], count: int, window: int | None = None) -> View:
    """The same tokens without a cache, attending to one another causally."""
    return View(_positions(start, count), window=window)


def _positions(start: Array, count: int) -> Array:
    return start[:, None] + jnp.arange(count)[None]

"""The key-value cache of one layer: [slot, kv_head, length, head_dim] each for keys and values.

The head axis comes before the position axis, so that a matmul batched over (slot, head) reads it without a transpose.

The cache does not store how many positions of a row are visible; its owner does. Lowering that number rolls a row
back: no token attends to the positions beyond it, and later writes replace them.
"""

from dataclasses import field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from specjax import kernels
from specjax.shared_prompts import SharedPrompts
from specjax.types import LayerCache, PyTree, TextCache, pytree


def empty(slots: int, length: int, kv_heads: int, head_dim: int, dtype: jnp.dtype) -> LayerCache:
    """Return a cache of zeros."""
    zeros = jnp.zeros((slots, kv_heads, length, head_dim), dtype)
    return LayerCache(zeros, zeros)


def write(
    cache: LayerCache, k: Float[Array, "B T G H"], v: Float[Array, "B T G H"], start: Int[Array, "B"]
) -> LayerCache:
    """Return the cache with T new positions of row b written at start[b].

    The caller leaves room for them: a write past the end would be clamped to an earlier start.
    """

    def put(into: Array, new: Array) -> Array:
        return kernels.write(into, jnp.swapaxes(new, 1, 2).astype(into.dtype), start)

    return LayerCache(put(cache.k, k), put(cache.v, v))


def resize(tree: PyTree, by: int) -> PyTree:
    """Return the tree with each cache longer by `by` positions of zeros, or shorter by its last -`by` positions."""

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
    """Positions of the T tokens of a forward, and the positions that each token attends to.

    Attributes:
        positions: int32 [B, T], for the rotary embedding.
        write:     int32 [B], cache index of the first token; None without a cache.
        mask:      bool [B, T, S] over the cached positions; None without a cache and in a pass of the training-time
                   test.
        rows:      The tokens are whole rows and attend causally to one another, whether or not a cache keeps them. Such
                   attention needs no mask, and memory that grows only with T. Static.
        window:    With `rows`, the number of last positions attended to, its own included; None: all. Static.
        prefix:    Each token may attend to exactly the positions up to its own. Static.
        at:        int32 [B, T], index of each token in its row, in a pass of the training-time test
                   (specjax.drafters.training_time_test); None: token t is at index t.
        depth:     Number of earlier passes, whose keys the cache holds. Static.
        shared:    With `rows`, how packed rows share prompts (specjax.shared_prompts); None: rows are not packed.
    """

    positions: Int[Array, "B T"]
    write: Int[Array, "B"] | None = None
    mask: Bool[Array, "B T S"] | None = None
    rows: bool = field(default=False, metadata={"static": True})
    window: int | None = field(default=None, metadata={"static": True})
    prefix: bool = field(default=False, metadata={"static": True})
    at: Int[Array, "B T"] | None = None
    depth: int = field(default=0, metadata={"static": True})
    shared: SharedPrompts | None = None


def token_at(x: Shaped[Array, "B T D"], index: Int[Array, "B"]) -> Shaped[Array, "B 1 D"]:
    """Return x at token `index` of each row."""
    return tokens_at(x, index[:, None])


def tokens_at(x: Shaped[Array, "B T *rest"], index: Int[Array, "B N"]) -> Shaped[Array, "B N *rest"]:
    """Return x at the tokens `index` of each row; zeros where a row has no such token."""
    index = index.reshape(*index.shape, *(1,) * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=1, mode="fill", fill_value=0)


def extended(
    x: Shaped[Array, "B T *rest"], new: Shaped[Array, "B O *rest"], at: Int[Array, "B"]
) -> Shaped[Array, "B N *rest"]:
    """Return the first at[b] tokens of each row followed by the new ones, N = T + O. Padding follows."""
    put = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice_in_dim(row, new, at, axis=0))
    return put(jnp.pad(x, ((0, 0), (0, new.shape[1]), *((0, 0),) * (x.ndim - 2))), new, at)


def decode_view(
    start: Int[Array, "B"],
    count: int,
    length: int,
    visible_from: Int[Array, "B"] | None = None,
    window: int | None = None,
) -> View:
    """Return the view of tokens start .. start + count - 1 on a cache of `length`; each attends up to its own position.

    Tokens that fill the cache must start at 0, so they are whole rows.

    visible_from: first visible position of each row; None: 0.
    window:       number of last positions attended to, its own included; None: all.
    """
    positions, index = _positions(start, count), jnp.arange(length)[None, None]
    mask = index <= positions[..., None]
    if visible_from is not None:
        mask &= index >= visible_from[:, None, None]
    if window is not None:
        mask &= index > positions[..., None] - window
    prefix = visible_from is None and window is None
    return View(positions, start, mask, rows=count == length and visible_from is None, window=window, prefix=prefix)


def uncached_view(
    start: Int[Array, "B"], count: int, window: int | None = None, shared: SharedPrompts | None = None
) -> View:
    """Return the view of tokens start .. start + count - 1 that attend to one another causally, without a cache.

    shared: the rows are packed and start at 0 (specjax.shared_prompts).
    """
    positions = _positions(start, count) if shared is None else shared.positions
    return View(positions, rows=True, window=window, shared=shared)


def _positions(start: Array, count: int) -> Array:
    return start[:, None] + jnp.arange(count)[None]

"""The key-value cache of one layer: [slot, kv_head, length, head_dim] each for keys and values.

Heads stand before positions, the order that a batched matmul over (slot, head) reads without moving anything.

A row's visible length is kept by its owner. Roll-back is setting it lower: what lies beyond is garbage that no token
attends to and that later writes replace.
"""

from collections.abc import Callable
from dataclasses import field
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from specjax.types import LayerCache, PyTree, TextCache, pytree

# XLA's CPU backend multiplies a head's keys with a few queries faster one query at a time, as a matrix with a vector,
# and with more of them where positions times head_dim are many; its values with two at most. Queries are the tokens
# times the heads that share the keys. Measured in float32, without YNNPACK, on 2 cores in jax 0.10.2: 1 to 32
# rows, 1 to 8 kv heads of 16 to 128, 40 to 1024 positions.
_MOST_BY_KEYS, _MOST_BY_LARGE_KEYS, _LARGE_KEYS, _MOST_BY_VALUES = 8, 16, 2**13, 2

Product = Callable[[str, Array, Array], Array]


def empty(slots: int, length: int, kv_heads: int, head_dim: int, dtype: jnp.dtype) -> LayerCache:
    """A cache of zeros."""
    zeros = jnp.zeros((slots, kv_heads, length, head_dim), dtype)
    return LayerCache(zeros, zeros)


def write(
    cache: LayerCache, k: Float[Array, "B T G H"], v: Float[Array, "B T G H"], start: Int[Array, "B"]
) -> LayerCache:
    """Row b gets its T new positions at start[b]. The caller leaves slack: a write past the end would be clamped.

    The vmapped update keeps a sharded slot axis local; `.at[rows, columns].set` gathers it. A lone row
    is written in the shape that `carried` gives it, so that a loop writes in place.
    """

    def put(into: Array, new: Array) -> Array:
        new = jnp.swapaxes(new, 1, 2).astype(into.dtype)
        if len(start) == 1:
            put_in = jax.lax.dynamic_update_slice_in_dim(_without_ones(into), _without_ones(new), start[0], axis=-2)
            return put_in.reshape(into.shape)
        return jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice_in_dim(row, new, at, axis=1))(
            into, new, start
        )

    return LayerCache(put(cache.k, k), put(cache.v, v))


def attend(q: Float[Array, "B T N H"], cache: LayerCache, mask: Bool[Array, "B T S"]) -> Float[Array, "B T N H"]:
    """Grouped-query attention over the cached positions that `mask` allows; N is a multiple of the kv heads.

    The queries of a group share their keys, which are never repeated. Scores and softmax are float32.
    """
    rows, count, heads, size = q.shape
    groups = heads // cache.k.shape[1]
    q = jnp.swapaxes(q.reshape(rows, count, -1, groups, size), 1, 2).reshape(rows, -1, count * groups, size)
    allowed = jnp.repeat(mask, groups, axis=1)[:, None]

    def weigh(by_keys: Product, by_values: Product, q: Array, k: Array, v: Array, allowed: Array) -> Array:
        scores = by_keys("bkqh,bksh->bkqs", q, k) * size**-0.5
        weights = jax.nn.softmax(jnp.where(allowed, scores, jnp.finfo(jnp.float32).min), axis=-1)
        return by_values("bkqs,bksh->bkqh", weights.astype(v.dtype), v).astype(v.dtype)

    most = _MOST_BY_LARGE_KEYS if cache.k.shape[2] * size >= _LARGE_KEYS else _MOST_BY_KEYS
    by_keys, by_values = (_each_query if q.shape[2] <= limit else _all_queries for limit in (most, _MOST_BY_VALUES))
    y = jax.lax.platform_dependent(
        q, *cache, allowed, cpu=partial(weigh, by_keys, by_values), default=partial(weigh, _all_queries, _all_queries)
    )
    return jnp.swapaxes(y.reshape(rows, -1, count, groups, size), 1, 2).reshape(rows, count, heads, size)


def _all_queries(axes: str, x: Array, y: Array) -> Array:
    return jnp.einsum(axes, x, y, preferred_element_type=jnp.float32)


def _each_query(axes: str, x: Array, y: Array) -> Array:
    """The same, a query (axis 2 of x and of the result) at a time."""
    axes = axes.replace("q", "")
    return jnp.stack([_all_queries(axes, x[:, :, i], y) for i in range(x.shape[2])], axis=2)


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


def carried(tree: PyTree) -> PyTree:
    """The tree as a loop carries it that writes to its caches: those of a lone row without axes of length 1.

    XLA drops such axes where it multiplies, and where the loop has them, its CPU backend (of jax 0.10.2) copies the
    cache for that up to four times a trip; where what holds the loop has them, once. With more rows it copies nothing.
    """

    def thin(x: PyTree) -> PyTree:
        return LayerCache(_without_ones(x.k), _without_ones(x.v)) if isinstance(x, LayerCache) else x

    return jax.tree.map(thin, tree, is_leaf=lambda x: isinstance(x, LayerCache))


def whole(tree: PyTree, like: PyTree) -> PyTree:
    """What `carried` was made of; `like` has its shapes."""
    return jax.tree.map(lambda x, y: x.reshape(y.shape), tree, like)


def _without_ones(x: Float[Array, "B G ..."]) -> Array:
    rows, heads, *rest = x.shape
    return x if rows > 1 else x.reshape((heads, *rest) if heads > 1 else rest)


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
    """What x holds for token `index` of each row."""
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

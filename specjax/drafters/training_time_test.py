"""Attention of EAGLE-3's training-time test (arXiv 2503.01840, section 3.2), over whole rows of T tokens or from drawn
anchors.

The cache holds the keys of all passes, one after the other. A query of pass d attends causally to the keys of pass 0,
which come from true features. Of the later passes it attends only to the keys at its own index, as it would when
decoding. These are T + d of the (d + 1) T keys. A window counts positions as in decoding: index t of pass s is at
position t + s.

With A anchors, the passes after the first hold A tokens each, and a mask says which keys an anchor attends to.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.cache import View, decode_view
from specjax.types import LayerCache


def unrolled_view(rows: int, count: int, depth: int, window: int | None = None) -> View:
    """Return the view of pass `depth` over rows of `count` tokens."""
    positions = jnp.tile(jnp.arange(count)[None] + depth, (rows, 1))
    return View(positions, write=jnp.full(rows, depth * count, jnp.int32), window=window)


def anchored_view(anchors: Int[Array, "B A"], count: int, depth: int, window: int | None = None) -> View:
    """Return the view of pass `depth` that starts at these indices of rows of `count` tokens.

    Pass 0 holds whole rows, of which the anchors alone are to be returned; later passes hold the anchors.
    """
    rows, number = anchors.shape
    if depth == 0:
        return decode_view(jnp.zeros(rows, jnp.int32), count, count, window=window)
    index, key_pass = jnp.arange(count)[None, None], jnp.repeat(jnp.arange(1, depth + 1), number)[None]
    pass_0, later_passes = index <= anchors[..., None], jnp.tile(jnp.eye(number, dtype=bool), depth)
    if window is not None:
        pass_0 &= anchors[..., None] + depth - index < window
        later_passes &= depth - key_pass < window
    mask = jnp.concatenate([pass_0, jnp.tile(later_passes[None], (rows, 1, 1))], axis=2)
    return View(anchors + depth, jnp.full(rows, count + (depth - 1) * number, jnp.int32), mask)


def unrolled_mask(count: int, depth: int, window: int | None) -> Bool[Array, "T T+{depth}"]:
    """Return the mask of the last pass d: for each index the T keys of pass 0, then its own keys of passes 1 .. d."""
    index, key_pass = jnp.arange(count), jnp.arange(1, depth + 1)
    pass_0 = index[None] <= index[:, None]
    later_passes = jnp.ones((count, depth), bool)
    if window is not None:
        pass_0 &= index[:, None] + depth - index[None] < window
        later_passes &= (depth - key_pass < window)[None]
    return jnp.concatenate([pass_0, later_passes], axis=1)


def attend_unrolled(
    q: Float[Array, "B T N H"], cache: LayerCache, window: int | None = None
) -> Float[Array, "B T N H"]:
    """Return grouped-query attention of the last pass in `cache`, [B, G, (d + 1) T, H].

    Scores and softmax are float32.
    """
    rows, count, heads, size = q.shape
    kv_heads = cache.k.shape[1]
    q = jnp.moveaxis(q.reshape(rows, count, kv_heads, -1, size), 1, 3)
    k, v = (x.reshape(rows, kv_heads, -1, count, size) for x in cache)
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores = product("bkgth,bkuh->bkgtu", q, k[:, :, 0]), product("bkgth,bksth->bkgts", q, k[:, :, 1:])
    allowed = unrolled_mask(count, k.shape[2] - 1, window)
    masked = jnp.where(allowed, jnp.concatenate(scores, axis=-1) * size**-0.5, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(masked, axis=-1).astype(v.dtype)
    pass_0, later_passes = weights[..., :count], weights[..., count:]
    y = product("bkgtu,bkuh->bkgth", pass_0, v[:, :, 0]) + product("bkgts,bksth->bkgth", later_passes, v[:, :, 1:])
    return jnp.moveaxis(y.astype(v.dtype), 3, 1).reshape(rows, count, heads, size)

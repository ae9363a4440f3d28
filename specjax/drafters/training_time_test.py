"""The passes of EAGLE-3's training-time test (arXiv 2503.01840, section 3.2) over whole rows of T tokens.

The cache holds the keys of all passes in turn. A query of pass d attends causally to those of pass 0, which
come from true features, and to those of the later passes at its own index alone, as it would when decoding: T + d keys
of the (d + 1) T. A window, too, is of positions as they are when decoding: pass s at index t stands at position t + s.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from specjax.cache import View
from specjax.types import LayerCache


def unrolled_view(rows: int, count: int, depth: int, window: int | None = None) -> View:
    """Pass `depth` of rows of `count` tokens."""
    positions = jnp.tile(jnp.arange(count)[None] + depth, (rows, 1))
    return View(positions, write=jnp.full(rows, depth * count, jnp.int32), window=window)


def unrolled_mask(count: int, depth: int, window: int | None) -> Bool[Array, "T T+{depth}"]:
    """Return which keys each index of the last pass sees: T of pass 0, then its own of passes 1 .. d."""
    index, made_in = jnp.arange(count), jnp.arange(1, depth + 1)
    first = index[None] <= index[:, None]
    own = jnp.ones((count, depth), bool)
    if window is not None:
        first &= index[:, None] + depth - index[None] < window
        own &= (depth - made_in < window)[None]
    return jnp.concatenate([first, own], axis=1)


def attend_unrolled(
    q: Float[Array, "B T N H"], cache: LayerCache, window: int | None = None
) -> Float[Array, "B T N H"]:
    """Grouped-query attention of the last pass in `cache`, [B, G, (d + 1) T, H]; scores and softmax are float32."""
    rows, count, heads, size = q.shape
    kv_heads = cache.k.shape[1]
    q = jnp.moveaxis(q.reshape(rows, count, kv_heads, -1, size), 1, 3)
    k, v = (x.reshape(rows, kv_heads, -1, count, size) for x in cache)
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    scores = product("bkgth,bkuh->bkgtu", q, k[:, :, 0]), product("bkgth,bksth->bkgts", q, k[:, :, 1:])
    allowed = unrolled_mask(count, k.shape[2] - 1, window)
    together = jnp.where(allowed, jnp.concatenate(scores, axis=-1) * size**-0.5, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(together, axis=-1).astype(v.dtype)
    first, own = weights[..., :count], weights[..., count:]
    y = product("bkgtu,bkuh->bkgth", first, v[:, :, 0]) + product("bkgts,bksth->bkgth", own, v[:, :, 1:])
    return jnp.moveaxis(y.astype(v.dtype), 3, 1).reshape(rows, count, heads, size)

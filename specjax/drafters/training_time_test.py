"""Attention of EAGLE-3's training-time test (arXiv 2503.01840, section 3.2): rows of T tokens, continued at anchors.

Pass 0 is causal attention over the row, whose keys come from true features. A query of pass d attends to these keys up
to its own index, and of each later pass only to the key at its own index, as it would when decoding. A window counts
positions as in decoding: index t of pass s is at position t + s.

The cache holds the keys of all passes, one after the other: T of pass 0, then of each later pass one for each anchor.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax import kernels
from specjax.cache import View
from specjax.types import LayerCache


def pass_view(anchors: Int[Array, "B A"], count: int, depth: int, window: int | None = None) -> View:
    """Return the view of pass `depth` over rows of `count` tokens. anchors: where the passes after pass 0 continue."""
    rows, continued = anchors.shape
    at = anchors if depth else jnp.tile(jnp.arange(count, dtype=jnp.int32)[None], (rows, 1))
    write = jnp.full(rows, count + (depth - 1) * continued if depth else 0, jnp.int32)
    return View(at + depth, write, rows=True, window=window, at=at if depth else None, depth=depth)


def attend_pass(q: Float[Array, "B N heads H"], cache: LayerCache, view: View) -> Float[Array, "B N heads H"]:
    """Return grouped-query attention of pass `view.depth`, 1 or more, whose keys are the last in `cache`."""
    depth, window, count = view.depth, view.window, q.shape[1]
    row = cache.k.shape[2] - depth * count
    # A window of one holds only the query's own key.
    passes = depth if window is None else min(depth, window)

    def by_pass(x: Float[Array, "B G S H"]) -> Float[Array, "B N D G H"]:
        later = x[:, :, row:].reshape(*x.shape[:2], depth, count, x.shape[3])
        return jnp.moveaxis(later[:, :, depth - passes :], 3, 1).swapaxes(2, 3)

    k, v = (jnp.swapaxes(x[:, :, :row], 1, 2) for x in cache)
    row_window = None if window is None else max(window - depth, 0)
    return kernels.attend_rows(q, k, v, (by_pass(cache.k), by_pass(cache.v)), row_window, view.at)

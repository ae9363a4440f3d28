"""Each pass of the training-time test attends by the mask that is published for it, with the gradients of that mask."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.cache import tokens_at
from specjax.drafters.training_time_test import attend_pass, pass_view
from specjax.kernels import plain
from specjax.types import LayerCache, PyTree
from tests.whole_rows import attend_dense

ROWS, COUNT, HEADS, WIDTH = 2, 7, 2, 3
ANCHORS = np.array([[0, 2, 3, 6], [1, 4, 5, 5]], np.int32)
EVERY = np.tile(np.arange(COUNT, dtype=np.int32), (ROWS, 1))


def published_mask(count: int, depth: int, window: int | None) -> np.ndarray:
    """Return the mask that is published for flex attention, over the keys of all passes.

    Keys of the first pass: `kv <= q`. Keys of later passes: `(kv - q) % T == 0`. In a window, a key has the position
    that it would have in decoding.
    """
    mask = np.zeros((count, (depth + 1) * count), bool)
    for q, key in np.ndindex(mask.shape):
        allowed = key <= q if key < count else (key - q) % count == 0
        distance = (q + depth) - (key % count + key // count)
        mask[q, key] = allowed and (window is None or distance < window)
    return mask


@pytest.mark.parametrize(
    "depth, shared, window", [(1, 1, None), (1, 2, 3), (2, 2, 1), (3, 2, 3), (7, 1, 3), (7, 2, None)]
)
def test_a_pass_attends_by_the_published_mask(depth: int, shared: int, window: int | None, monkeypatch):
    """Compare outputs and gradients in float64, over all indices and from anchors, in chunks of three queries."""
    monkeypatch.setattr(plain, "QUERIES", 3)
    random = np.random.default_rng(depth)
    shape = ROWS, HEADS, (depth + 1) * COUNT, WIDTH
    args = random.normal(size=(ROWS, COUNT, HEADS * shared, WIDTH)), *random.normal(size=(2, *shape))
    mask = published_mask(COUNT, depth, window)

    def from_anchors(x: jax.Array) -> jax.Array:
        """Return the keys that a cache would hold of anchors: all of pass 0, then those at the anchors."""
        row, later = x[:, :, :COUNT], x[:, :, COUNT:].reshape(ROWS, HEADS, depth, COUNT, WIDTH)
        index = jnp.asarray(ANCHORS)[:, None, None, :, None]
        return jnp.concatenate([row, jnp.take_along_axis(later, index, 3).reshape(ROWS, HEADS, -1, WIDTH)], 2)

    def wanted(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend_dense(q, *(jnp.swapaxes(x, 1, 2) for x in (k, v)), mask)

    def found(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend_pass(q, LayerCache(k, v), pass_view(jnp.asarray(EVERY), COUNT, depth, window))

    def wanted_anchors(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return tokens_at(wanted(q, k, v), jnp.asarray(ANCHORS))

    def found_anchors(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        view = pass_view(jnp.asarray(ANCHORS), COUNT, depth, window)
        return attend_pass(tokens_at(q, jnp.asarray(ANCHORS)), LayerCache(from_anchors(k), from_anchors(v)), view)

    def total(function: Callable) -> Callable:
        return lambda *args: jnp.sum(jnp.sin(function(*args)))

    @jax.jit
    def results(*x: jax.Array) -> list[PyTree]:
        functions = found, found_anchors, wanted, wanted_anchors
        return [(function(*x), jax.grad(total(function), (0, 1, 2))(*x)) for function in functions]

    with jax.enable_x64(True):
        leaves = jax.tree.leaves(results(*(jnp.asarray(x) for x in args)))
    half = len(leaves) // 2
    for x, y in zip(leaves[:half], leaves[half:], strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12)


def test_each_pass_is_one_position_later_and_appends_to_the_cache():
    view = pass_view(jnp.asarray(EVERY), COUNT, 2)
    np.testing.assert_array_equal(view.positions, np.tile(np.arange(COUNT) + 2, (ROWS, 1)))
    np.testing.assert_array_equal(view.write, np.full(ROWS, 2 * COUNT))
    view = pass_view(jnp.asarray(ANCHORS), COUNT, 3)
    np.testing.assert_array_equal(view.positions, ANCHORS + 3)
    np.testing.assert_array_equal(view.write, np.full(ROWS, COUNT + 2 * ANCHORS.shape[1]))

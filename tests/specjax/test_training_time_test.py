import jax.numpy as jnp
import numpy as np
import pytest

from specjax import kernels
from specjax.drafters.training_time_test import attend_unrolled, unrolled_view
from specjax.types import LayerCache

ROWS, COUNT, HEADS, WIDTH = 2, 5, 2, 3


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


@pytest.mark.parametrize("window", [None, 1, 3])
def test_a_pass_attends_by_the_published_mask(window: int | None):
    """Compare with attention over the keys of all passes under that mask, with and without shared keys."""
    random = np.random.default_rng(0)
    for depth, shared in ((0, 1), (1, 2), (3, 2)):
        q = jnp.asarray(random.normal(size=(ROWS, COUNT, HEADS * shared, WIDTH)), jnp.float32)
        shape = 2, ROWS, HEADS, (depth + 1) * COUNT, WIDTH
        cache = LayerCache(*jnp.asarray(random.normal(size=shape), jnp.float32))
        mask = jnp.broadcast_to(published_mask(COUNT, depth, window), (ROWS, COUNT, shape[3]))
        np.testing.assert_allclose(attend_unrolled(q, cache, window), kernels.attend(q, cache, mask), atol=1e-5)


def test_each_pass_is_one_position_later_and_appends_to_the_cache():
    view = unrolled_view(ROWS, COUNT, 2)
    np.testing.assert_array_equal(view.positions, np.tile(np.arange(COUNT) + 2, (ROWS, 1)))
    np.testing.assert_array_equal(view.write, np.full(ROWS, 2 * COUNT))

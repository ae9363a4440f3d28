import jax.numpy as jnp
import numpy as np

from specjax import cache as kv
from specjax.types import LayerCache

SLOTS, LENGTH, HEADS, WIDTH = 4, 9, 2, 3


def filled() -> LayerCache:
    values = jnp.arange(SLOTS * LENGTH * HEADS * WIDTH, dtype=jnp.float32).reshape(SLOTS, LENGTH, HEADS, WIDTH)
    return LayerCache(values, -values)


def test_write_puts_each_row_at_its_own_start():
    before = filled()
    new = np.random.default_rng(0).normal(size=(2, SLOTS, 3, HEADS, WIDTH)).astype(np.float32)
    start = np.array([0, 6, 2, 5])
    after = kv.write(before, jnp.asarray(new[0]), jnp.asarray(new[1]), jnp.asarray(start))
    for old, written, got in zip(before, new, after, strict=True):
        expected = np.array(old)
        for row, at in enumerate(start):
            expected[row, at : at + 3] = written[row]
        np.testing.assert_array_equal(got, expected)


def test_write_keeps_the_dtype_of_the_cache():
    cache = kv.empty(SLOTS, LENGTH, HEADS, WIDTH, jnp.dtype(jnp.bfloat16))
    new = jnp.full((SLOTS, 1, HEADS, WIDTH), 1.5, jnp.float32)
    after = kv.write(cache, new, new, jnp.zeros(SLOTS, jnp.int32))
    assert after.k.dtype == after.v.dtype == jnp.bfloat16
    np.testing.assert_array_equal(after.k[:, 0].astype(jnp.float32), new[:, 0])
    assert not after.k[:, 1:].any()


def test_mask_shows_each_token_the_positions_up_to_its_own():
    start = np.array([0, 3, 5])
    mask = np.asarray(kv.causal_mask(jnp.asarray(start), 4, 7))
    assert mask.shape == (3, 4, 7)
    for row, query, key in np.ndindex(mask.shape):
        assert mask[row, query, key] == (key <= start[row] + query)
    np.testing.assert_array_equal(kv.positions(jnp.asarray(start), 3), start[:, None] + np.arange(3))

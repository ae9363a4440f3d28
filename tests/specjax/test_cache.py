import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import cache as kv
from specjax import kernels
from specjax.types import LayerCache

SLOTS, LENGTH, HEADS, WIDTH = 4, 9, 2, 3


def filled(slots: int = SLOTS, heads: int = HEADS) -> LayerCache:
    values = jnp.arange(slots * heads * LENGTH * WIDTH, dtype=jnp.float32).reshape(slots, heads, LENGTH, WIDTH)
    return LayerCache(values, -values)


@pytest.mark.parametrize(("start", "heads"), [((0, 6, 2, 5), 2), ((4,), 2), ((6,), 1)])
def test_write_puts_each_row_at_its_own_start(start, heads):
    before = filled(len(start), heads)
    new = np.random.default_rng(0).normal(size=(2, len(start), 3, heads, WIDTH)).astype(np.float32)
    after = kv.write(before, jnp.asarray(new[0]), jnp.asarray(new[1]), jnp.array(start))
    for old, written, got in zip(before, new, after, strict=True):
        expected = np.array(old)
        for row, at in enumerate(start):
            expected[row, :, at : at + 3] = written[row].swapaxes(0, 1)
        np.testing.assert_array_equal(got, expected)


def test_write_keeps_the_dtype_of_the_cache():
    cache = kv.empty(SLOTS, LENGTH, HEADS, WIDTH, jnp.dtype(jnp.bfloat16))
    new = jnp.full((SLOTS, 1, HEADS, WIDTH), 1.5, jnp.float32)
    after = kv.write(cache, new, new, jnp.zeros(SLOTS, jnp.int32))
    assert after.k.dtype == after.v.dtype == jnp.bfloat16
    np.testing.assert_array_equal(after.k[:, :, 0].astype(jnp.float32), new[:, 0])
    assert not after.k[:, :, 1:].any()


@pytest.mark.parametrize("length", [LENGTH, 2**13])
@pytest.mark.parametrize("count", [1, 3, 5])
def test_attention_over_a_cache_equals_that_with_repeated_keys(length: int, count: int):
    """Compare with a float64 softmax per head, for several numbers of query heads per key, small and large caches."""
    slots, random = 4, np.random.default_rng(0)
    for shared in (1, 2, 4):
        q = random.normal(size=(slots, count, HEADS * shared, WIDTH))
        k, v = random.normal(size=(2, slots, HEADS, length, WIDTH))
        mask = random.random((slots, count, length)) < 0.5
        mask[..., 0] = True
        cache = LayerCache(np.float32(k), np.float32(v))
        got = np.asarray(jax.jit(kernels.attend)(np.float32(q), cache, mask))
        for row, token, head in np.ndindex(slots, count, HEADS * shared):
            scores = k[row, head // shared] @ q[row, token, head] / np.sqrt(WIDTH)
            weights = np.where(mask[row, token], np.exp(scores), 0.0)
            expected = weights / weights.sum() @ v[row, head // shared]
            np.testing.assert_allclose(got[row, token, head], expected, atol=1e-5)


@pytest.mark.parametrize(("first", "window"), [(None, None), (np.array([0, 1, 4]), 3)])
def test_a_token_attends_to_positions_up_to_its_own_within_the_window(first: np.ndarray | None, window: int | None):
    start = np.array([0, 3, 5])
    view = kv.decode_view(jnp.asarray(start), 4, 9, None if first is None else jnp.asarray(first), window=window)
    np.testing.assert_array_equal(view.positions, start[:, None] + np.arange(4))
    np.testing.assert_array_equal(view.write, start)
    mask = np.asarray(view.mask)
    assert mask.shape == (3, 4, 9)
    for row, query, key in np.ndindex(mask.shape):
        own = start[row] + query
        least = 0 if first is None or window is None else max(first[row], own - window + 1)
        assert mask[row, query, key] == (least <= key <= own)
    uncached = kv.uncached_view(jnp.asarray(start), 4)
    np.testing.assert_array_equal(uncached.positions, view.positions)
    assert uncached.write is None and uncached.mask is None


def test_resize_keeps_the_first_positions():
    before = filled()
    for by in (-4, 0, 2):
        resized, other = kv.resize((before, before.k), by)
        assert other is before.k
        for x, y in zip(resized, before, strict=True):
            kept = min(LENGTH + by, LENGTH)
            assert x.shape == (SLOTS, HEADS, LENGTH + by, WIDTH)
            np.testing.assert_array_equal(x[:, :, :kept], y[:, :, :kept])
            assert not x[:, :, kept:].any()

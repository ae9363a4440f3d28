import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import cache as kv
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


@pytest.mark.parametrize(("slots", "heads", "carried"), [(4, 1, 4), (1, 2, 3), (1, 1, 2)])
def test_a_loop_carries_the_caches_of_a_lone_row_without_axes_of_length_1(slots, heads, carried):
    state = {"cache": (filled(slots, heads),), "other": jnp.ones((1, 1, 2))}
    thin = kv.carried(state)
    assert thin["cache"][0].k.ndim == thin["cache"][0].v.ndim == carried and thin["other"].ndim == 3
    chex.assert_trees_all_equal(kv.whole(thin, state), state)


@pytest.mark.parametrize("length", [LENGTH, 2**13])
@pytest.mark.parametrize("count", [1, 3, 5])
def test_attention_over_a_cache_is_that_of_repeated_keys(length: int, count: int):
    """Against a float64 softmax, head by head, for each number of query heads that share a key; small caches, large."""
    slots, random = 4, np.random.default_rng(0)
    for shared in (1, 2, 4):
        q = random.normal(size=(slots, count, HEADS * shared, WIDTH))
        k, v = random.normal(size=(2, slots, HEADS, length, WIDTH))
        mask = random.random((slots, count, length)) < 0.5
        mask[..., 0] = True
        cache = LayerCache(jnp.asarray(k, jnp.float32), jnp.asarray(v, jnp.float32))
        got = kv.attend(jnp.asarray(q, jnp.float32), cache, jnp.asarray(mask))
        for row, token, head in np.ndindex(slots, count, HEADS * shared):
            scores = k[row, head // shared] @ q[row, token, head] / np.sqrt(WIDTH)
            weights = np.where(mask[row, token], np.exp(scores), 0.0)
            expected = weights / weights.sum() @ v[row, head // shared]
            np.testing.assert_allclose(got[row, token, head], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("positions", "queries", "platform", "products"),
    [
        (2**11 - 1, 1, "cpu", 2),
        (2**11 - 1, 2, "cpu", 4),
        (2**11 - 1, 3, "cpu", 4),
        (2**11 - 1, 8, "cpu", 9),
        (2**11 - 1, 9, "cpu", 2),
        (2**11, 9, "cpu", 10),
        (2**11, 16, "cpu", 17),
        (2**11, 17, "cpu", 2),
        (2**11, 9, "cuda", 2),
    ],
)
def test_few_queries_are_multiplied_one_by_one_on_a_cpu(positions: int, queries: int, platform: str, products: int):
    cache = kv.empty(1, positions, 1, 4, jnp.dtype(jnp.float32))
    q, mask = jnp.zeros((1, queries, 1, 4)), jnp.ones((1, queries, positions), bool)
    lowered = jax.jit(kv.attend).trace(q, cache, mask).lower(lowering_platforms=(platform,))
    assert lowered.as_text().count("stablehlo.dot_general") == products


def test_attention_keeps_bfloat16():
    """Scores and softmax are float32, so that what is lost is the rounding of weights and result."""
    random = np.random.default_rng(0)
    q = jnp.asarray(random.normal(size=(2, 3, 4, 8)), jnp.bfloat16)
    k, v = jnp.asarray(random.normal(size=(2, 2, 2, 9, 8)), jnp.bfloat16)
    mask = jnp.tril(jnp.ones((2, 3, 9), bool), 6)
    got = kv.attend(q, LayerCache(k, v), mask)
    wide = kv.attend(q.astype(jnp.float32), LayerCache(k.astype(jnp.float32), v.astype(jnp.float32)), mask)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), wide, atol=2e-2)


def test_a_decoding_token_sees_the_positions_up_to_its_own():
    start = np.array([0, 3, 5])
    view = kv.decode_view(jnp.asarray(start), 4, 7)
    np.testing.assert_array_equal(view.positions, start[:, None] + np.arange(4))
    np.testing.assert_array_equal(view.write, start)
    mask = np.asarray(view.mask)
    assert mask.shape == (3, 4, 7)
    for row, query, key in np.ndindex(mask.shape):
        assert mask[row, query, key] == (key <= start[row] + query)
    uncached = kv.uncached_view(jnp.asarray(start), 4)
    np.testing.assert_array_equal(uncached.positions, view.positions)
    assert uncached.write is None and uncached.mask is None


def test_a_window_is_of_the_last_positions():
    start, first = np.array([0, 3, 5]), np.array([0, 1, 4])
    mask = np.asarray(kv.decode_view(jnp.asarray(start), 4, 9, jnp.asarray(first), window=3).mask)
    for row, query, key in np.ndindex(mask.shape):
        own = start[row] + query
        assert mask[row, query, key] == (max(first[row], own - 2) <= key <= own)


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

"""Attention over whole rows is exact, and training with it takes memory that grows with their length."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.config import DecoderConfig
from models.drafts.eagle3 import eagle3_like
from specjax.cache import decode_view
from specjax.kernels import plain
from specjax.types import PyTree
from tests.specjax.training import AS_SHIPPED, mesh_of
from tests.whole_rows import attend_dense, squares, training_program

LENGTH = 11
SIZE = dict(hidden_size=16, intermediate_size=32, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=24)
DECODER = DecoderConfig(**SIZE, num_layers=2, feature_layers=(0, 1))


def causal_mask(window: int | None) -> np.ndarray:
    q, key = np.arange(LENGTH)[:, None], np.arange(LENGTH)[None]
    return (key <= q) & (window is None or key > q - window)


@pytest.mark.parametrize("shared, window, queries", [(1, None, LENGTH), (3, None, 4), (2, 4, 4), (1, 1, 8)])
def test_attention_and_its_gradient_are_exact(shared: int, window: int | None, queries: int, monkeypatch):
    """Compare in float64, in chunks that do not divide the row and in one piece; and with jax's own in float32."""
    monkeypatch.setattr(plain, "QUERIES", queries)
    random = np.random.default_rng(shared)
    args = random.normal(size=(2, LENGTH, 2 * shared, 8)), *random.normal(size=(2, 2, LENGTH, 2, 8))

    def results(function: Callable, dtype: str) -> PyTree:
        with jax.enable_x64(dtype == "float64"):
            given = [jnp.asarray(x, dtype) for x in args]
            slopes = jax.grad(lambda *x: jnp.sum(jnp.sin(function(*x))), (0, 1, 2))
            return jax.jit(lambda *x: (function(*x), slopes(*x)))(*given)

    def found(*args: jax.Array) -> jax.Array:
        return plain.attend_rows(*args, window=window)

    def jax_own(*args: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(
            *args, is_causal=True, local_window_size=None if window is None else (window - 1, 0)
        )

    expected = results(lambda *args: attend_dense(*args, causal_mask(window)), "float64")
    for dtype, reference, close in (("float64", expected, 1e-12), ("float32", results(jax_own, "float32"), 1e-5)):
        for x, y in zip(jax.tree.leaves(results(found, dtype)), jax.tree.leaves(reference), strict=True):
            np.testing.assert_allclose(x, y, rtol=close, atol=close)


def test_tokens_that_fill_a_cache_are_whole_rows():
    start = jnp.zeros(2, jnp.int32)
    assert decode_view(start, 5, 5, window=3).rows
    assert not decode_view(start, 5, 6).rows and not decode_view(start, 5, 5, visible_from=start).rows


def test_memory_of_training_grows_with_the_length_of_rows(monkeypatch):
    """Four times the length takes about four times the memory, and no array has two axes of the length."""
    monkeypatch.setattr(plain, "QUERIES", 32)
    memory = []
    for length in (256, 1024):
        compiled = training_program(DECODER, eagle3_like(DECODER, 24), mesh_of(1), length).compile()
        assert not squares(compiled.as_text() or "", length)
        analysis = compiled.memory_analysis()
        assert analysis is not None
        memory.append(analysis.temp_size_in_bytes)
    assert memory[1] < 5 * memory[0], memory
    monkeypatch.setattr(plain, "QUERIES", 256)
    q = jax.ShapeDtypeStruct((1, 256, 2, 8), "float32")
    assert squares(jax.jit(plain.attend_rows).lower(q, q, q).compile().as_text() or "", 256)


def test_bfloat16_gradients_add_up_in_float32(monkeypatch):
    """Over 64 chunks: in bfloat16 the sums would lose several percent."""
    random = np.random.default_rng(0)
    args = tuple(jnp.asarray(random.normal(size=(1, 256, heads, 8)), jnp.bfloat16) for heads in (2, 1, 1))

    def slopes(*args: jax.Array) -> PyTree:
        return jax.grad(lambda *x: jnp.sum(plain.attend_rows(*x).astype(jnp.float32)), (0, 1, 2))(*args)

    def gap(queries: int) -> float:
        monkeypatch.setattr(plain, "QUERIES", queries)
        found = jax.jit(lambda *x: slopes(*x))(*args)
        assert all(x.dtype == jnp.bfloat16 for x in found)
        wide = [np.asarray(x, np.float64) for x in found]
        return max(np.abs(x - y).max() / np.abs(y).max() for x, y in zip(wide, expected, strict=True))

    with jax.enable_x64(True):
        expected = [np.asarray(x) for x in jax.jit(slopes)(*(np.asarray(x, np.float64) for x in args))]
    assert gap(4) < 0.015


def test_training_in_bfloat16_runs_as_xla_is_shipped():
    """XLA for CPUs (jax 0.10.2) compiles some bfloat16 products and then cannot run them; the flags of tests hide it.

    It did with two rows and six queries for each key.
    """
    decoder = replace(DECODER, dtype="bfloat16")
    lowered = training_program(decoder, eagle3_like(decoder, 24, num_heads=12), mesh_of(1), LENGTH, rows=2)
    random = np.random.default_rng(0)
    args, _ = jax.tree.map(lambda x: jnp.asarray(abs(random.normal(0, 0.3, x.shape)), x.dtype), lowered.in_avals)
    for gradients in lowered.compile(compiler_options=AS_SHIPPED)(*args):
        leaves = [np.asarray(x, np.float64) for x in jax.tree.leaves(gradients)]
        assert all(np.isfinite(x).all() for x in leaves) and any(x.any() for x in leaves)

"""The compared implementations of attention agree, also if attention is computed in two parts."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.gpu import two_parts
from benchmarks.gpu.attention import Attend, Cell, by_length, candidates, masked_cudnn
from benchmarks.gpu.two_parts import cudnn, in_two_parts, xla
from launch.bench.presets import PRESETS
from specjax.cache import View, decode_view
from specjax.kernels import plain
from specjax.types import LayerCache

# Earlier positions of each row.
START, LENGTH = np.array([1, 4, 9], np.int32), 13
CUDNN = "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version"


def attended(count: int, dtype: Any = np.float32) -> tuple[jax.Array, LayerCache, View]:
    """Return 4 heads of `count` queries, and 2 heads of keys and values with garbage where no query may attend."""
    view, rng, rows = decode_view(jnp.asarray(START), count, LENGTH), np.random.default_rng(count), len(START)
    cached = rng.normal(size=(2, rows, 2, LENGTH, 8))
    for row, start in enumerate(START):
        cached[:, row, :, start + count :] = 1e3
    with jax.enable_x64(dtype == np.float64):
        q, k, v = (jnp.asarray(x, dtype) for x in (rng.normal(size=(rows, count, 4, 8)), *cached))
    return q, LayerCache(k, v), view


@pytest.mark.parametrize("queries", [1, 3])
def test_all_implementations_of_attention_agree(queries: int):
    preset = PRESETS["tiny"]
    cells = [Cell(name, attend, preset, 2, 5, queries, 1) for name, attend in candidates(queries).items()]
    assert len(cells) > 1
    for cell in cells:
        np.testing.assert_allclose(cell.once, cells[0].once, atol=1e-5)
        assert 0 < cell.measure() < 10


@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize("count", [1, 4])
def test_two_parts_are_one_attention(count: int, fold: bool):
    """Compare in float64, where the order of sums changes results by about 1e-15."""
    q, cache, view = attended(count, np.float64)
    with jax.enable_x64(True):
        scores = jnp.einsum("btgnh,bgsh->bgnts", q.reshape(3, count, 2, 2, 8), cache.k) * 8**-0.5
        weights = jax.nn.softmax(jnp.where(view.mask[:, None, None], scores, -jnp.inf), axis=-1)
        expected = jnp.einsum("bgnts,bgsh->btgnh", weights, cache.v).reshape(q.shape)
        found = in_two_parts(xla, xla, q, cache, view.positions[:, 0], fold=fold)
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-13)


def test_a_rounded_log_sum_exp_would_cost_accuracy():
    """This is why jax's public function, which rounds it to bfloat16, is not used."""

    def rounded(*args: Any) -> tuple[jax.Array, jax.Array]:
        y, lse = xla(*args)
        return y, lse.astype(jnp.bfloat16).astype(jnp.float32)

    q, cache, view = attended(4)
    exact = plain.attend(q, cache, view.mask)
    gaps = [
        float(jnp.abs(in_two_parts(part, part, q, cache, view.positions[:, 0]) - exact).max())
        for part in (xla, rounded)
    ]
    assert gaps[0] < 1e-5 < 1e-3 < gaps[1]


def lowered(attend: Attend, count: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the program lowered for CUDA, which needs no GPU."""
    monkeypatch.setattr(CUDNN, lambda: 91000)
    q, cache, view = attended(count, jnp.bfloat16)
    return jax.jit(attend).trace(q, cache, view).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    "attend, count, masks",
    [
        (masked_cudnn, 4, ["NO_MASK"]),
        (partial(by_length, fold=False), 1, ["PADDING"]),
        (partial(by_length, fold=True), 1, ["PADDING"]),
        (lambda q, cache, view: in_two_parts(cudnn, cudnn, q, cache, view.write), 4, ["PADDING", "CAUSAL"]),
        (lambda q, cache, view: in_two_parts(cudnn, xla, q, cache, view.write, fold=True), 4, ["PADDING"]),
    ],
)
def test_cudnn_is_asked_for_the_right_masks(
    attend: Attend, count: int, masks: list[str], monkeypatch: pytest.MonkeyPatch
):
    text = lowered(attend, count, monkeypatch)
    assert re.findall(r"mask_type.{2,9}?([A-Z_]+)", text) == masks
    # The cache is passed unchanged: no array of its size is transposed.
    assert not re.search(rf"transpose.*-> tensor<3x\w*{LENGTH}x\w*bf16>", text)


def test_cudnn_gives_a_log_sum_exp_in_float32(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(CUDNN, lambda: 91000)
    q, cache, view = attended(4, jnp.bfloat16)
    y, lse = jax.eval_shape(two_parts.cudnn, jnp.swapaxes(q, 1, 2), cache.k, cache.v, view.write)
    assert (y.shape, y.dtype) == ((3, 4, 4, 8), jnp.bfloat16) and (lse.shape, lse.dtype) == ((3, 4, 4), jnp.float32)

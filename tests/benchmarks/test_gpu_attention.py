"""The compared implementations of attention agree, also if attention is computed in two parts."""

import re
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from benchmarks.bench.presets import PRESETS
from benchmarks.gpu.attention import Attend, AttentionCell, candidates, masked_cudnn, two_parts
from specjax.cache import View, decode_view
from specjax.kernels import cudnn, plain
from specjax.parallel.mesh import BATCH_AXES
from specjax.types import LayerCache
from tests.specjax.training import mesh_of

# Earlier positions of each row.
START, LENGTH = np.array([0, 4, 9], np.int32), 13
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
    cells = [AttentionCell(name, attend, preset, 2, 5, queries, 1) for name, attend in candidates().items()]
    assert len(cells) > 1
    for cell in cells:
        np.testing.assert_allclose(cell.once, cells[0].once, atol=1e-5)
        assert 0 < cell.measure() < 10


def xla(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return cuDNN's output and log-sum-exp, in the dtype of the arguments."""
    scores = jnp.einsum("bnqh,bnsh->bnqs", q, k) * q.shape[-1] ** -0.5
    inside = jnp.arange(k.shape[2], dtype=jnp.int32)[None] < lengths[:, None]
    scores = jnp.where(inside[:, None, None], scores, -jnp.inf)
    return jnp.einsum("bnqs,bnsh->bnqh", jax.nn.softmax(scores), v), jax.nn.logsumexp(scores, axis=-1)


@pytest.mark.parametrize("count", [1, 4])
def test_two_parts_are_one_attention(count: int):
    """Compare in float64, where the order of sums changes results by about 1e-15. One row starts at position 0."""
    q, cache, view = attended(count, np.float64)
    with jax.enable_x64(True):
        scores = jnp.einsum("btgnh,bgsh->bgnts", q.reshape(3, count, 2, 2, 8), cache.k) * 8**-0.5
        weights = jax.nn.softmax(jnp.where(view.mask[:, None, None], scores, -jnp.inf), axis=-1)
        expected = jnp.einsum("bgnts,bgsh->btgnh", weights, cache.v).reshape(q.shape)
        found = cudnn.in_two_parts(xla, q, cache, view.write)
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-13)


def test_a_log_sum_exp_is_in_float32_because_a_rounded_one_would_cost_accuracy(monkeypatch: pytest.MonkeyPatch):
    """This is why jax's public function, which rounds it to bfloat16, is not used."""
    monkeypatch.setattr(CUDNN, lambda: 91000)
    q, cache, view = attended(4, jnp.bfloat16)
    y, lse = jax.eval_shape(cudnn.over_cache, jnp.swapaxes(q, 1, 2)[:, :2], cache.k, cache.v, view.write)
    assert (y.shape, y.dtype) == ((3, 2, 4, 8), jnp.bfloat16) and (lse.shape, lse.dtype) == ((3, 2, 4), jnp.float32)

    def rounded(*args: Any) -> tuple[jax.Array, jax.Array]:
        y, lse = xla(*args)
        return y, lse.astype(jnp.bfloat16).astype(jnp.float32)

    q, cache, view = attended(4)
    exact = plain.attend(q, cache, view.mask)
    gaps = [float(jnp.abs(cudnn.in_two_parts(part, q, cache, view.write) - exact).max()) for part in (xla, rounded)]
    assert gaps[0] < 1e-5 < 1e-3 < gaps[1]


def lowered(attend: Attend, count: int, monkeypatch: pytest.MonkeyPatch, mesh: Mesh | None = None) -> str:
    """Return the program lowered for CUDA, which needs no GPU."""
    monkeypatch.setattr(CUDNN, lambda: 91000)
    q, cache, view = attended(count, jnp.bfloat16)
    with jax.set_mesh(mesh) if mesh is not None else nullcontext():
        return jax.jit(attend).trace(q, cache, view).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    "attend, count, mask", [(masked_cudnn, 4, "NO_MASK"), (two_parts, 1, "PADDING"), (two_parts, 4, "PADDING")]
)
def test_cudnn_is_asked_for_the_right_masks(attend: Attend, count: int, mask: str, monkeypatch: pytest.MonkeyPatch):
    text = lowered(attend, count, monkeypatch)
    assert re.findall(r"mask_type.{2,9}?([A-Z_]+)", text) == [mask]
    # The cache is passed unchanged: no array of its size is transposed.
    assert not re.search(rf"transpose.*-> tensor<3x\w*{LENGTH}x\w*bf16>", text)


@pytest.mark.parametrize("manual", [(), BATCH_AXES])
def test_each_device_calls_cudnn_with_its_own_heads(manual: tuple[str, ...], monkeypatch: pytest.MonkeyPatch):
    """On a mesh that divides the two heads of keys, within a rollout's island or outside."""
    monkeypatch.setattr(cudnn, "LEAST_POSITIONS_OF_SEVERAL", LENGTH)
    monkeypatch.setattr(cudnn, "LEAST_HEADS", 1)

    def attend(q: jax.Array, cache: LayerCache, view: View) -> jax.Array:
        def run(q: jax.Array, cache: LayerCache, start: jax.Array) -> jax.Array:
            return cudnn.attend(q, cache, jnp.zeros((3, 4, LENGTH), bool), start)

        if manual:
            run = jax.shard_map(run, in_specs=P(manual), out_specs=P(manual), axis_names=set(manual), check_vma=False)
        return run(q, cache, view.write)

    text = lowered(attend, 4, monkeypatch, mesh_of(1, 1, 2))
    asked = re.findall(r"custom_call @__cudnn.*?: \((tensor<\w+>), (tensor<\w+>)", text)
    assert cudnn.ROW_AXES == BATCH_AXES
    assert asked == [("tensor<3x1x8x8xbf16>", f"tensor<3x1x{LENGTH}x8xbf16>")]


@pytest.mark.parametrize(
    "other", [{"start": None}, {"dtype": jnp.float32}, {"positions": LENGTH + 1}, {"heads": 7}, {}]
)
def test_xla_attends_where_cudnn_cannot_or_does_not_pay(other: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cudnn, "LEAST_POSITIONS_OF_SEVERAL", other.get("positions", LENGTH))
    monkeypatch.setattr(cudnn, "LEAST_HEADS", other.get("heads", 6))
    if other:
        monkeypatch.setattr(CUDNN, lambda: 91000)
    q, cache, view = attended(4, other.get("dtype", jnp.bfloat16))
    y = cudnn.attend(q, cache, view.mask, other.get("start", view.write))
    assert (y == plain.attend(q, cache, view.mask)).all()


def whole_rows(count: int, dtype: Any = jnp.bfloat16) -> tuple[jax.Array, ...]:
    random = np.random.default_rng(0)
    return tuple(jnp.asarray(random.normal(size=(2, count, heads, 8)), dtype) for heads in (4, 2, 2))


@pytest.mark.parametrize("count, window", [(64, None), (65, None), (70, 3)])
def test_training_attends_to_whole_rows_with_cudnn(count: int, window: int | None, monkeypatch: pytest.MonkeyPatch):
    """Forward and backward are causal and hold no scores. jax refuses odd numbers of tokens: such rows get one more."""
    monkeypatch.setattr(CUDNN, lambda: 91000)

    def total(*args: jax.Array) -> jax.Array:
        return jnp.sum(cudnn.attend_rows(*args, window=window).astype(jnp.float32))

    traced = jax.jit(jax.grad(total, (0, 1, 2))).trace(*whole_rows(count))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    even = count + count % 2
    assert len(re.findall(rf"custom_call @__cudnn.*tensor<2x{even}x4x8xbf16>", text)) == 2
    assert re.findall(r"mask_type.{2,9}?([A-Z_]+)", text) == ["CAUSAL"] * 2
    assert re.findall(r"sliding_window_length.{1,4}: (\d+)", text) == [str(window or 0)] * 2
    assert not re.search(rf"x({count}|{even})x({count}|{even})x", text)


@pytest.mark.parametrize("other", ["float32", "short", "own", "at"])
def test_xla_attends_to_whole_rows_where_cudnn_cannot(other: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(CUDNN, lambda: 91000)
    count = cudnn.LEAST_ROW - (other == "short")
    q, k, v = whole_rows(count, jnp.float32 if other == "float32" else jnp.bfloat16)
    options: dict[str, Any] = {"own": (k[:, :, None], v[:, :, None])} if other == "own" else {}
    if other == "at":
        options["at"] = jnp.zeros((2, count), jnp.int32)
    assert (cudnn.attend_rows(q, k, v, **options) == plain.attend_rows(q, k, v, **options)).all()


@pytest.mark.parametrize("count, window", [(65, None), (70, 3)])
def test_cudnn_attends_to_rows_as_the_plain_kernel(count: int, window: int | None, monkeypatch: pytest.MonkeyPatch):
    """Values and gradients, in float32 with XLA in cuDNN's place: the padding of odd rows and the window are right."""
    monkeypatch.setattr(CUDNN, lambda: 91000)
    monkeypatch.setattr(cudnn, "HALF", (jnp.float32,))
    own = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *x, implementation, **options: own(*x, **options))

    def results(operation: Any) -> Any:
        def run(*args: jax.Array) -> jax.Array:
            return operation(*args, window=window)

        return run(*args), jax.grad(lambda *x: jnp.sum(jnp.sin(run(*x))), (0, 1, 2))(*args)

    args = whole_rows(count, jnp.float32)
    for x, y in zip(*(jax.tree.leaves(results(each.attend_rows)) for each in (cudnn, plain)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)

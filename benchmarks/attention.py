"""Time the attention of a verification over the cache: each available implementation, paired with the one in use.

Run from the repository's root: python -m benchmarks.attention

One layer with T = K + 1 queries per row. The cache is full, and visible up to each query. Implementations:
- specjax.kernels.attend, the one in use
- jax.nn.dot_product_attention by XLA, with the mask
- the same by cuDNN on a GPU, with the mask, which becomes a bias
- the same by cuDNN with lengths alone, for T = 1: lengths cannot mask T > 1 queries from each other
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from launch.bench.sections.decoding import CopyBandwidth
from launch.timing import format_interval, format_provenance, interleaved, minus_startup, time_call
from specjax import cache as kv
from specjax import kernels
from specjax.types import LayerCache

IN_USE = "specjax.kernels"


@dataclass(frozen=True)
class Shape:
    """Sizes to measure.

    Attributes:
        heads:    Query heads of the layer.
        kv_heads: Key-value heads of the layer.
        head_dim: Width of a head.
        dtype:    Dtype of queries and cache.
        batches:  Numbers of rows.
        contexts: Numbers of cached positions per row.
    """

    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    batches: tuple[int, ...]
    contexts: tuple[int, ...]


# On a CPU: the 25m preset of launch.bench. On a GPU: Qwen3-8B.
SHAPES = {
    "cpu": Shape(8, 4, 64, "float32", (1, 4, 16), (256, 1024)),
    "gpu": Shape(32, 8, 128, "bfloat16", (1, 8, 32, 64, 256), (1024, 8192)),
}

Attend = Callable[[Array, Array, Array, kv.View], Array]


def in_use(q: Array, k: Array, v: Array, view: kv.View) -> Array:
    """Attend with specjax.kernels. k and v have heads before positions."""
    assert view.mask is not None
    return kernels.attend(q, LayerCache(k, v), view.mask)


def masked(implementation: Any, q: Array, k: Array, v: Array, view: kv.View) -> Array:
    """Attend with jax.nn.dot_product_attention and the mask."""
    assert view.mask is not None
    with jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(q, k, v, mask=view.mask[:, None], implementation=implementation)


def by_length(q: Array, k: Array, v: Array, view: kv.View) -> Array:
    """Attend with cuDNN and lengths instead of the mask. T must be 1."""
    one, lengths = jnp.ones(len(q), jnp.int32), view.positions[:, -1] + 1
    return jax.nn.dot_product_attention(
        q, k, v, query_seq_lengths=one, key_value_seq_lengths=lengths, implementation="cudnn"
    )


def candidates(queries: int) -> dict[str, Attend]:
    """Return the implementations for T = `queries`, by name."""
    found: dict[str, Attend] = {IN_USE: in_use, "jax, XLA": partial(masked, "xla")}
    if jax.default_backend() == "gpu":
        found["cuDNN, mask"] = partial(masked, "cudnn")
        if queries == 1:
            found["cuDNN, lengths"] = by_length
    return found


class Cell:
    """One implementation at one size: a compiled program of `count` calls in sequence.

    The constructor compiles, and raises the implementation's error if it does not support the shape.
    """

    def __init__(self, name: str, attend: Attend, shape: Shape, rows: int, context: int, queries: int, count: int):
        room = context + queries
        keys = jax.random.split(jax.random.key(0), 3)
        cached = rows, room, shape.kv_heads, shape.head_dim
        k, v = (jax.random.normal(key, cached).astype(shape.dtype) for key in keys[:2])
        if name == IN_USE:
            k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
        q = jax.random.normal(keys[2], (rows, queries, shape.heads, shape.head_dim)).astype(shape.dtype)
        start = jnp.full(rows, context, jnp.int32)

        def repeated(q: Array, k: Array, v: Array, start: Array, count: Int[Array, ""]) -> Array:
            view = kv.decode_view(start, queries, room)
            # The result of each call is the query of the next, so XLA cannot remove a call.
            return jax.lax.fori_loop(0, count, lambda _, q: attend(q, k, v, view), q)

        self._run = partial(jax.jit(repeated), q, k, v, start)
        self._count = count
        self.once = np.asarray(self._run(jnp.int32(1)).astype(jnp.float32))
        self._start = min(time_call(partial(self._run, jnp.int32(0))) for _ in range(5))

    def measure(self) -> float:
        """Return the seconds of one call."""
        return minus_startup(time_call(partial(self._run, jnp.int32(self._count))), self._start) / self._count


def compare(
    shape: Shape, rows: int, context: int, queries: int, copy: CopyBandwidth, options: argparse.Namespace
) -> None:
    """Time all implementations in turns and print a line for each."""
    cells, refused = {}, {}
    for name, attend in candidates(queries).items():
        try:
            cells[name] = Cell(name, attend, shape, rows, context, queries, options.calls)
        except Exception as error:
            refused[name] = str(error).splitlines()[0][:80]
    runs: Mapping[str, Callable[[], float]] = {name: cell.measure for name, cell in cells.items()}
    measured = interleaved({**runs, "copy": copy.measure}, options.repeats)
    size = 2 * rows * context * shape.kv_heads * shape.head_dim * jnp.dtype(shape.dtype).itemsize
    for name in cells:
        ratios = [mine / own for mine, own in zip(measured[IN_USE], measured[name], strict=True)]
        fraction = [size / rate / own for rate, own in zip(measured["copy"], measured[name], strict=True)]
        off = np.abs(cells[name].once - cells[IN_USE].once).max()
        print(
            f"{rows:4} {context:6} {queries:2}  {name:15} {1e3 * float(np.median(measured[name])):9.4f}  "
            f"{format_interval(ratios):22} {format_interval(fraction):22} {off:.1e}",
            flush=True,
        )
    for name, why in refused.items():
        print(f"{rows:4} {context:6} {queries:2}  {name:15} not supported: {why}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9, help="timings of each implementation, in turns")
    parser.add_argument("--calls", type=int, default=36, help="calls of the layer per timing")
    parser.add_argument(
        "--queries", type=int, nargs="+", default=[1, 4], help="values of T, the tokens per row and verification"
    )
    options = parser.parse_args()
    shape = SHAPES["gpu" if jax.default_backend() == "gpu" else "cpu"]
    print(format_provenance("benchmarks.attention"))
    print(f"shape     {shape.heads} heads, {shape.kv_heads} kv heads of {shape.head_dim}, {shape.dtype}")
    copy = CopyBandwidth()
    print(
        "rows context T  implementation   ms a call  in use / it            share of copy's floor  largest difference"
    )
    for context in shape.contexts:
        for rows in shape.batches:
            for queries in options.queries:
                compare(shape, rows, context, queries, copy, options)


if __name__ == "__main__":
    main()

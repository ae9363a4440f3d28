"""Time the attention of a verification over the cache: each available implementation, paired with the one in use.

Run from the repository's root: python -m benchmarks.gpu.attention

One layer with T = K + 1 queries per row. The cache is full, and visible up to each query. Implementations:
- specjax.kernels.attend, the one in use
- specjax.kernels.plain, XLA's
- jax.nn.dot_product_attention by XLA, with the mask; its cache has positions before heads
- on a GPU, cuDNN with the mask, which becomes a bias
- on a GPU, cuDNN in two parts (specjax.kernels.cudnn), which is in use for long caches
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product, starmap
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.cudnn.fused_attention_stablehlo import dot_product_attention as _attention
from jaxtyping import Array, Int

from benchmarks.bench.presets import PRESETS, Preset, find_preset
from benchmarks.bench.report import NO_ROOM, BenchSection, Results, Row, cell_by_cell, ratio, where_it_fits
from benchmarks.bench.sections.decoding import CopyBandwidth
from launch.timing import minus_startup, time_call, turn_by_turn
from specjax import cache as kv
from specjax import kernels
from specjax.kernels import cudnn, plain
from specjax.types import LayerCache

IN_USE = "specjax.kernels"
# The one implementation that takes [rows, positions, heads, size].
POSITIONS_FIRST = "jax, XLA"
# Calls between two waits for the host: as many as Qwen3-8B has layers.
LAYERS = 36
NOTES = (
    "in use / it: time of specjax.kernels over this one's",
    "share of floor: bytes of the visible keys and values over copy bandwidth, over the time",
    "difference: the largest from specjax.kernels in any output",
    NO_ROOM,
)

# jax declares it to return what its overloads for training do, too.
cudnn_attention: Callable[..., Any] = _attention

Attend = Callable[[Array, LayerCache, kv.View], Array]


def in_use(q: Array, cache: LayerCache, view: kv.View) -> Array:
    """Attend with specjax.kernels."""
    assert view.mask is not None
    return kernels.attend(q, cache, view.mask, view.write)


def xla(q: Array, cache: LayerCache, view: kv.View) -> Array:
    """Attend with specjax.kernels.plain."""
    assert view.mask is not None
    return plain.attend(q, cache, view.mask)


def masked_xla(q: Array, cache: LayerCache, view: kv.View) -> Array:
    """Attend with jax.nn.dot_product_attention and the mask. The cache has positions before heads."""
    assert view.mask is not None
    with jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(q, cache.k, cache.v, mask=view.mask[:, None], implementation="xla")


def masked_cudnn(q: Array, cache: LayerCache, view: kv.View) -> Array:
    """Attend with cuDNN and the mask."""
    assert view.mask is not None
    queries, scale = jnp.swapaxes(q, 1, 2), q.shape[-1] ** -0.5
    y = cudnn_attention(queries, cache.k, cache.v, mask=view.mask[:, None], scale=scale, qkv_layout="BNTH")
    return jnp.swapaxes(y, 1, 2)


def two_parts(q: Array, cache: LayerCache, view: kv.View) -> Array:
    """Attend with cuDNN in two parts."""
    assert view.write is not None
    return cudnn.in_two_parts(cudnn.over_cache, q, cache, view.write)


def candidates() -> dict[str, Attend]:
    """Return the implementations by name."""
    implementations: dict[str, Attend] = {IN_USE: in_use, "plain": xla, POSITIONS_FIRST: masked_xla}
    if jax.default_backend() == "gpu":
        implementations |= {"cuDNN, mask": masked_cudnn, "cuDNN, two parts": two_parts}
    return implementations


class AttentionCell:
    """One implementation at one size: a compiled program of `count` passes of LAYERS calls, all in sequence.

    The constructor compiles, and raises the implementation's error if it does not support the shape.
    """

    def __init__(self, name: str, attend: Attend, preset: Preset, rows: int, context: int, queries: int, count: int):
        decoder, room = preset.decoder, context + queries
        keys = jax.random.split(jax.random.key(0), 3)
        cached = rows, decoder.num_kv_heads, room, decoder.head_dim
        k, v = (jax.random.normal(key, cached).astype(decoder.dtype) for key in keys[:2])
        if name == POSITIONS_FIRST:
            k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
        q = jax.random.normal(keys[2], (rows, queries, decoder.num_heads, decoder.head_dim)).astype(decoder.dtype)

        def once(q: Array, cache: LayerCache, start: Array) -> Array:
            return attend(q, cache, kv.decode_view(start, queries, room))

        def repeated(count: Int[Array, ""], q: Array, cache: LayerCache, start: Array) -> Array:
            # The result of each call is the query of the next, so XLA cannot remove a call. A GPU waits for the host in
            # each iteration of a loop whose length is traced, but not in the iterations of the inner loop.
            def one_pass(_: Array, q: Array) -> Array:
                return jax.lax.fori_loop(0, LAYERS, lambda _, q: once(q, cache, start), q)

            return jax.lax.fori_loop(0, count, one_pass, q)

        args = q, LayerCache(k, v), jnp.full(rows, context, jnp.int32)
        self.once = np.asarray(jax.jit(once)(*args).astype(jnp.float32))
        program = jax.jit(repeated)
        self._run, self._count = lambda count: program(jnp.int32(count), *args), count
        self._run(1)
        self._startup = min(time_call(partial(self._run, 0)) for _ in range(5))

    def measure(self) -> float:
        """Return the seconds of one call."""
        return minus_startup(time_call(partial(self._run, self._count)), self._startup) / (self._count * LAYERS)


def compare(
    preset: Preset, rows: int, context: int, queries: int, copy: CopyBandwidth, options: argparse.Namespace
) -> Iterator[list[Row]]:
    """Time all implementations in turns, and yield a row for each after every turn."""
    cells, refused = {}, {}
    for name, attend in candidates().items():
        try:
            cells[name] = AttentionCell(name, attend, preset, rows, context, queries, options.passes)
        except Exception as error:
            refused[name] = (str(error) or type(error).__name__).splitlines()[0][:80]
    runs: Mapping[str, Callable[[], float]] = {name: cell.measure for name, cell in cells.items()}
    decoder = preset.decoder
    size = 2 * rows * context * decoder.num_kv_heads * decoder.head_dim * jnp.dtype(decoder.dtype).itemsize

    def row(name: str, measured: Mapping[str, list[float]]) -> Row:
        return {
            "implementation": name,
            "ms": 1e3 * float(np.median(measured[name])),
            "in use / it": ratio(measured[IN_USE], measured[name]) if IN_USE in cells else None,
            "share of floor": ratio([size / rate for rate in measured["copy"]], measured[name]),
            "difference": float(np.abs(cells[name].once - cells[IN_USE].once).max()) if IN_USE in cells else None,
            "note": "",
            "turns, s": measured[name],
        }

    for measured in turn_by_turn({**runs, "copy": copy.measure}, options.repeats):
        rest = ({"implementation": name, "note": why} for name, why in refused.items())
        yield [*(row(name, measured) for name in cells), *rest]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--preset", choices=sorted(PRESETS), help="preset of benchmarks.bench; by default this device's"
    )
    parser.add_argument("--repeats", type=int, default=9, help="timings of each implementation, in turns")
    parser.add_argument("--passes", type=int, default=4, help=f"passes of {LAYERS} calls in one timing")
    parser.add_argument(
        "--queries", type=int, nargs="+", default=[1, 4], help="values of T, the tokens per row and verification"
    )
    parser.add_argument("--batches", type=int, nargs="+", help="numbers of rows; by default the preset's")
    parser.add_argument("--contexts", type=int, nargs="+", help="cached positions per row; by default the preset's")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    name, preset = find_preset(options.preset)
    results = Results("benchmarks.gpu.attention", name, options.json)
    copy = CopyBandwidth()

    def cell(context: int, batch: int, queries: int) -> Iterator[list[Row]]:
        named: Row = {"context": context, "batch": batch, "T": queries}
        return where_it_fits(named, partial(compare, preset, batch, context, queries, copy, options))

    grid = product(options.contexts or preset.contexts, options.batches or preset.batches, options.queries)
    tables = cell_by_cell(starmap(cell, grid))
    title = "attention of one layer over a full cache"
    results.follow("attention", (BenchSection(title, rows, NOTES) for rows in tables))


if __name__ == "__main__":
    main()

"""Sequence-length buckets: rows are sorted, split into microbatches, and each is cut to the smallest bucket that fits.

A rollout is padded to the longest row it could have. Each microbatch takes its bucket, a window of positions, from a
short static ladder. So a few long rows do not make all microbatches long, and nothing recompiles when lengths change.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from specjax.parallel.mesh import BATCH_AXES
from specjax.train.batch import Sequences
from specjax.types import PyTree

T = TypeVar("T")
S = TypeVar("S", bound=Sequences)


def check_ladder(ladder: tuple[int, ...]) -> None:
    """Raise ValueError unless these lengths ascend."""
    if list(ladder) != sorted(set(ladder)):
        raise ValueError(f"ladder = {ladder}: must be total lengths in ascending order")


def windows(ladder: tuple[int, ...], length: int) -> tuple[int, ...]:
    """Return the windows of the ladder that are shorter than `length`, and `length` itself as the last."""
    return *(window for window in ladder if window < length), length


def rung(lengths: Int[Array, "B"], windows: tuple[int, ...]) -> Int[Array, ""]:
    """Return the index, int32, of the smallest window that holds the longest row. The last window must hold any row."""
    return jnp.sum(jnp.max(lengths) > jnp.array(windows[:-1], jnp.int32), dtype=jnp.int32)


def in_window(run: Callable[..., T], ladder: tuple[int, ...], sequences: Sequences, *args: Array) -> T:
    """Return `run(sequences, *args)` with all arrays cut to the smallest window of the ladder that holds every row.

    args: [R, S] too. Arrays of one axis are not cut, nor are keys, which are shorter. Do not differentiate through it:
    every branch would store its residuals for the backward pass.
    """
    if not ladder:
        return run(sequences, *args)
    choices = windows(ladder, sequences.tokens.shape[1])

    def cut(window: int, *given: PyTree) -> T:
        return run(*jax.tree.map(lambda x: x[:, :window] if x.ndim > 1 else x, given))

    index = rung(sequences.lengths, choices)
    return jax.lax.switch(index, [partial(cut, window) for window in choices], sequences, *args)


def sort_rows(sequences: S, mesh: Mesh, parts: int, minibatches: int = 1) -> S:
    """Return the rows of each data shard in the order in which `split` makes parts of similar length, shortest first.

    With several minibatches, which `split` makes first, each has the rows it had before, and parts of its own. No row
    leaves its shard. Rows [R, ..] as before; R must divide over the shards and those over minibatches and parts.
    """
    return take_rows(sequences, sorted_order(sequences, mesh, parts, minibatches), mesh)


def sorted_order(sequences: Sequences, mesh: Mesh, parts: int, minibatches: int = 1) -> Int[Array, "R"]:
    """Return int32 [R]: which of its shard's rows `sort_rows` puts in each place."""

    def order(lengths: Array) -> Array:
        each = lengths.reshape(-1, minibatches).T
        # `split` takes every parts-th row.
        taken = jax.vmap(lambda lengths: jnp.argsort(lengths).reshape(parts, -1).T.ravel())(each)
        return (taken * minibatches + jnp.arange(minibatches)[:, None]).T.ravel()

    return _per_shard(order, mesh)(sequences.lengths)


def take_rows(tree: T, order: Int[Array, "R"], mesh: Mesh) -> T:
    """Return the rows of each shard in this order."""
    return _per_shard(lambda tree, order: jax.tree.map(lambda x: x[order], tree), mesh)(tree, order)


def put_back(tree: T, order: Int[Array, "R"], mesh: Mesh) -> T:
    """Undo `take_rows`."""
    return take_rows(tree, _per_shard(jnp.argsort, mesh)(order), mesh)


def _per_shard(run: Callable[..., T], mesh: Mesh) -> Callable[..., T]:
    rows = P(BATCH_AXES)
    return jax.shard_map(run, mesh=mesh, in_specs=rows, out_specs=rows, axis_names=set(BATCH_AXES))

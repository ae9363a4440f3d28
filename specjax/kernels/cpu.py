"""Kernels for CPUs, where XLA multiplies matrices with Eigen in float32 and with YNNPACK in bfloat16.

Each was measured on jax 0.10.2 with `python -m benchmarks.kernels` (benchmarks/results/kernels_cpu.txt).
"""

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.kernels import plain
from specjax.kernels.plain import State
from specjax.types import LayerCache, PyTree

# Most queries that are multiplied one at a time: by keys, by keys of at least LARGE_KEYS numbers, and by values. The
# number of queries is tokens times heads that share the keys. Measured with 1 to 32 rows, 1 to 8 heads of 16 to 128
# numbers, and 40 to 1024 positions, in float32.
MOST_BY_KEYS, MOST_BY_LARGE_KEYS, LARGE_KEYS, MOST_BY_VALUES = 8, 16, 2**13, 2


def matmul(x: Float[Array, "*batch_in"], kernel: Float[Array, "*in_features"], contract: int = 1) -> Array:
    """Multiply; bfloat16 factors give a float32 result, which is then rounded (`_product`)."""
    if x.dtype != jnp.bfloat16:
        return plain.matmul(x, kernel, contract)
    batch, inner = x.shape[: x.ndim - contract], math.prod(x.shape[x.ndim - contract :])
    y = _rounded(x.reshape(math.prod(batch), inner), kernel.reshape(inner, -1))
    return y.reshape(*batch, *kernel.shape[contract:])


def matmul_transposed(x: Float[Array, "*batch D"], table: Float[Array, "V D"]) -> Float[Array, "*batch V"]:
    """Multiply by a table's transpose: a float32 table is transposed first, a bfloat16 table is used as it is.

    In a loop, the transpose is done once before the first iteration. Without the barrier XLA multiplies by the
    untransposed float32 table, which takes Eigen ten times as long. With a transposed bfloat16 table YNNPACK takes two
    to three times as long.
    """
    if x.dtype != jnp.bfloat16:
        return plain.matmul(x, jax.lax.optimization_barrier(table.T))
    return _rounded_transposed(x.reshape(-1, x.shape[-1]), table).reshape(*x.shape[:-1], -1)


def grouped(
    x: Float[Array, "M D"], weights: Float[Array, "groups D F"], sizes: Int[Array, "groups"]
) -> Float[Array, "M F"]:
    """Multiply as `plain.grouped` does, with XLA's own operation."""
    y = jax.lax.ragged_dot(x, weights, sizes)
    return jnp.where(jnp.arange(len(x))[:, None] < jnp.sum(sizes), y, jnp.zeros((), y.dtype))


def attend(
    q: Float[Array, "B T N H"], cache: LayerCache, mask: Bool[Array, "B T S"], start: Int[Array, "B"] | None = None
) -> Float[Array, "B T N H"]:
    """Attend as `plain.attend` does, but multiply few float32 queries one at a time, each as a vector by a matrix.

    In bfloat16 that gains nothing.
    """
    if q.dtype == jnp.bfloat16:
        return plain.attend(q, cache, mask)
    queries = q.shape[1] * q.shape[2] // cache.k.shape[1]
    large = math.prod(cache.k.shape[2:]) >= LARGE_KEYS
    most = MOST_BY_LARGE_KEYS if large else MOST_BY_KEYS, MOST_BY_VALUES
    by_keys, by_values = (_each_query if queries <= n else plain.product for n in most)
    return plain.grouped_attention(q, cache, mask, by_keys, by_values)


def _each_query(axes: str, x: Array, y: Array) -> Array:
    """Return `plain.product`, computed for one query (axis 2 of x and of the result) at a time."""
    axes = axes.replace("q", "")
    return jnp.stack([plain.product(axes, x[:, :, i], y) for i in range(x.shape[2])], axis=2)


def write(into: Float[Array, "B G S H"], new: Float[Array, "B G T H"], start: Int[Array, "B"]) -> Array:
    """Write a single row in the shape in which `while_loop` carries it, so that the write is in place."""
    if len(start) > 1:
        return plain.write(into, new, start)
    thin = jax.lax.dynamic_update_slice_in_dim(_without_ones(into), _without_ones(new), start[0], axis=-2)
    return thin.reshape(into.shape)


def while_loop(condition: Callable[[State], Bool[Array, ""]], body: Callable[[State], State], state: State) -> State:
    """Run a while loop that carries the caches of a single row without axes of length 1.

    XLA drops such axes in matrix products. If the loop carries them, it copies a cache to do so, up to four times per
    iteration.
    """
    restored = partial(_restored, like=state)
    carried = jax.lax.while_loop(lambda x: condition(restored(x)), lambda x: _thin(body(restored(x))), _thin(state))
    return restored(carried)


def switch(index: Int[Array, ""] | int, branches: Sequence[Callable[[State], State]], state: State) -> State:
    """Run a switch that passes the state as `while_loop` carries it.

    Otherwise each branch would copy the caches of a single row for its loop.
    """
    restored = partial(_restored, like=state)
    thin = [lambda x, branch=branch: _thin(branch(restored(x))) for branch in branches]
    return restored(jax.lax.switch(index, thin, _thin(state)))


def argmax(x: Float[Array, "*batch V"]) -> Int[Array, "*batch"]:
    """Return the argmax. Taking a maximum first materialises x: noise computed inside an argmax is slow."""
    return plain.argmax(jnp.minimum(x, jnp.max(x, axis=-1, keepdims=True)))


def computed_once(x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
    """Return x, materialised: multiplied by the identity, which keeps its bits.

    Without this, every layer computes the angles of its rotary embedding again, and keeps them under rematerialisation:
    a fifth more memory in tests/models/test_remat.py. Rounds of preset 25m take the same time with and without it.
    """
    return x @ jnp.eye(x.shape[-1], dtype=x.dtype)


def compiler_options(dtype: jnp.dtype) -> dict[str, Any]:
    """Return options that compile float32 without YNNPACK, and matmuls on one core if a device has at most two.

    Handing half of a small matmul to a second core costs as much as it saves.
    """
    if dtype == jnp.bfloat16:
        return {}
    threads = (os.cpu_count() or 1) / jax.local_device_count()
    return {"xla_cpu_experimental_ynn_fusion_type": "", "xla_cpu_multi_thread_eigen": threads > 2}


def _product(x: Float[Array, "R D"], kernel: Float[Array, "D F"]) -> Float[Array, "R F"]:
    """Multiply two matrices for a float32 result, then round it, so that YNNPACK reads bfloat16 factors directly.

    For a bfloat16 result, XLA of jax 0.10.2 (not of 0.12) first makes float32 copies of both.
    """
    return jax.lax.dot(x, kernel, preferred_element_type=jnp.float32).astype(x.dtype)


def _product_transposed(x: Float[Array, "R D"], table: Float[Array, "V D"]) -> Float[Array, "R V"]:
    axes = ((1,), (1,)), ((), ())
    return jax.lax.dot_general(x, table, axes, preferred_element_type=jnp.float32).astype(x.dtype)


# The gradients multiply in bfloat16 too. The default gradients would use a float32 cotangent.
_rounded = jax.custom_vjp(_product)
_rounded.defvjp(
    lambda x, kernel: (_product(x, kernel), (x, kernel)),
    lambda factors, g: (_product_transposed(g, factors[1]), _product(factors[0].T, g)),
)
_rounded_transposed = jax.custom_vjp(_product_transposed)
_rounded_transposed.defvjp(
    lambda x, table: (_product_transposed(x, table), (x, table)),
    lambda factors, g: (_product(g, factors[1]), _product(g.T, factors[0])),
)


def _thin(tree: PyTree) -> PyTree:
    def thin(x: PyTree) -> PyTree:
        return LayerCache(_without_ones(x.k), _without_ones(x.v)) if isinstance(x, LayerCache) else x

    return jax.tree.map(thin, tree, is_leaf=lambda x: isinstance(x, LayerCache))


def _restored(tree: PyTree, like: PyTree) -> PyTree:
    return jax.tree.map(lambda x, y: x.reshape(y.shape), tree, like)


def _without_ones(x: Float[Array, "B G ..."]) -> Array:
    rows, heads, *matrix = x.shape
    return x if rows > 1 else x.reshape((heads, *matrix) if heads > 1 else matrix)

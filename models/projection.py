"""Dense layers, and how a CPU multiplies the few rows of a round by their kernels."""

import math
from collections.abc import Mapping
from functools import partial
from typing import cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from models.config import LayerConfig
from specjax.types import PyTree

# Rows of a vector of Eigen's (AVX-512, float32).
VECTOR = 16
# How many rows are multiplied faster by a turned kernel, and of how many elements on; below, turning the rows costs
# what it saves. `python -m benchmarks.turned`, jax 0.10.2 without YNNPACK.
TURNED_ROWS = (*range(8, 17), *range(25, 33), *range(41, 49))
TURNED_SIZE = 2**18


class Projection(nn.Module):
    """A dense layer over the last `contract` axes of its input: [*batch, *in] -> [*batch, *features].

    Its kernel [*in, *features] carries logical axis names. Where its parameters hold the kernel `turned` too,
    TURNED_ROWS rows are multiplied by that.
    """

    config: LayerConfig
    features: int | tuple[int, ...]
    axes: tuple[str | None, ...]
    contract: int = 1
    bias: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        c, contract = self.config, self.contract
        batch, inner = x.shape[: x.ndim - contract], x.shape[x.ndim - contract :]
        features = (self.features,) if isinstance(self.features, int) else self.features
        fan_in = nn.initializers.variance_scaling(
            1.0,
            "fan_in",
            "truncated_normal",
            in_axis=tuple(range(contract)),
            out_axis=tuple(range(contract, contract + len(features))),
        )
        kernel = self._parameter("kernel", fan_in, self.axes, (*inner, *features))
        x = x.astype(c.dtype)
        if self.has_variable("params", "turned") and math.prod(batch) in TURNED_ROWS:
            y = _by_turned(x, self.get_variable("params", "turned"), contract)
        else:
            y = _by_kernel(x, kernel, contract)
        if self.bias:
            bias = self._parameter("bias", nn.initializers.zeros, self.axes[contract:], features)
            y += bias.reshape((1,) * len(batch) + features)
        return y

    def _parameter(
        self, name: str, init: nn.initializers.Initializer, axes: tuple[str | None, ...], shape: tuple[int, ...]
    ) -> Array:
        boxed = nn.with_logical_partitioning(init, axes)
        return cast(Array, self.param(name, boxed, shape, jnp.dtype(self.config.param_dtype))).astype(self.config.dtype)


def turned(params: PyTree) -> PyTree:
    """Parameters with `turned` [*reversed(features), *reversed(in)] beside each large kernel, on CPUs in float32.

    Eigen packs the left factor of what it is given as a product of columns, which is the kernel, anew for every
    product; of a turned one it packs the rows instead, a vector at a time, and one that is not full costs more than one
    that is. So rows are filled up to whole vectors, and where that takes many the kernel as it is does better.
    """
    if not isinstance(params, Mapping) or jax.default_backend() != "cpu":
        return params
    laid_out = {name: turned(part) for name, part in params.items()}
    kernel = params.get("kernel")
    if isinstance(kernel, jax.Array) and kernel.size >= TURNED_SIZE and kernel.dtype == jnp.float32:
        laid_out["turned"] = kernel.T
    return laid_out


def _by_turned(x: Array, kernel: Array, contract: int) -> Array:
    batch, inner = x.shape[: x.ndim - contract], x.shape[x.ndim - contract :]
    rows, axes = math.prod(batch), (range(kernel.ndim - contract, kernel.ndim), range(contract))
    columns = x.reshape(rows, *inner).T
    if rows > VECTOR // 2:
        columns = jnp.pad(columns, (*((0, 0) for _ in inner), (0, -rows % VECTOR)))
    # XLA would undo it: the transpose of a product becomes one with the factors' transposes, the kernel's a copy.
    y = jax.lax.optimization_barrier(jax.lax.dot_general(kernel, columns, (axes, ((), ()))))
    return y[..., :rows].T.reshape(*batch, *reversed(y.shape[:-1]))


def _by_kernel(x: Array, kernel: Array, contract: int) -> Array:
    """On a CPU two rows one by one.

    XLA's CPU backend (of jax 0.10.2, without YNNPACK) takes longer for two rows than twice for one: by a tenth where
    the weights come from memory, twice as long where they are in its cache.
    """
    batch = x.shape[: x.ndim - contract]
    axes = range(len(batch), x.ndim), range(contract)
    whole = partial(jax.lax.dot_general, dimension_numbers=(axes, ((), ())))
    if math.prod(batch) != 2:
        return whole(x, kernel)

    def apart(x: Array, kernel: Array) -> Array:
        axis = batch.index(2)
        return jnp.concatenate([whole(row, kernel) for row in jnp.split(x, 2, axis)], axis)

    return jax.lax.platform_dependent(x, kernel, cpu=apart, default=whole)

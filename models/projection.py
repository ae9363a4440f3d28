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
from specjax.parallel.mesh import for_cpu
from specjax.types import PyTree

# Rows of a vector of Eigen's (AVX-512, float32).
VECTOR = 16
# How many rows are multiplied faster by a turned kernel, how many by one in halves, and of how many elements on; below,
# either costs what it saves. `python -m benchmarks.layouts`, 2 cores, jax 0.10.2 without YNNPACK.
TURNED_ROWS = (*range(13, 17), *range(25, 33), *range(41, 49))
HALVED_ROWS = range(5, 25)
LAID_OUT_SIZE = 2**18


class Projection(nn.Module):
    """A dense layer over the last `contract` axes of its input: [*batch, *in] -> [*batch, *features].

    Its kernel [*in, *features] carries logical axis names. Where its parameters hold it in `halves` too (`laid_out`),
    HALVED_ROWS rows are multiplied by these; else where they hold it `turned`, TURNED_ROWS rows by that.
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
        x, rows = x.astype(c.dtype), math.prod(batch)
        if self.has_variable("params", "halves") and rows in HALVED_ROWS:
            y = jnp.concatenate([_by_kernel(x, half, contract) for half in self.get_variable("params", "halves")], -1)
        elif self.has_variable("params", "turned") and rows in TURNED_ROWS:
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


def laid_out(params: PyTree) -> PyTree:
    """Parameters with large kernels in other layouts beside their own, on CPUs in float32.

    turned: [*reversed(features), *reversed(in)], of each. Eigen packs the left factor of what it is given as a product
            of columns, which is the kernel, anew for every product; of a turned one it packs the rows instead, a vector
            at a time, and one that is not full costs more than one that is. So rows are filled up to whole vectors, and
            where that takes many the kernel as it is does better.
    halves: two of [in, features / 2], of matrices that narrow to half or less. A product with so few columns Eigen
            leaves to one core; two that do not wait for each other run beside each other.
    """
    if not isinstance(params, Mapping) or not for_cpu():
        return params
    made = {name: laid_out(part) for name, part in params.items()}
    kernel = params.get("kernel")
    if isinstance(kernel, jax.Array) and kernel.size >= LAID_OUT_SIZE and kernel.dtype == jnp.float32:
        made["turned"] = kernel.T
        if kernel.ndim == 2 and kernel.shape[0] >= 2 * kernel.shape[1] and kernel.shape[1] % 2 == 0:
            made["halves"] = tuple(jnp.split(kernel, 2, axis=-1))
    return made


def _by_turned(x: Array, kernel: Array, contract: int) -> Array:
    batch, inner = x.shape[: x.ndim - contract], x.shape[x.ndim - contract :]
    rows, axes = math.prod(batch), (range(kernel.ndim - contract, kernel.ndim), range(contract))
    columns = jnp.pad(x.reshape(rows, *inner).T, (*((0, 0) for _ in inner), (0, -rows % VECTOR)))
    # XLA would undo it: the transpose of a product becomes one with the factors' transposes, the kernel's a copy.
    y = jax.lax.optimization_barrier(jax.lax.dot_general(kernel, columns, (axes, ((), ()))))
    return y[..., :rows].T.reshape(*batch, *reversed(y.shape[:-1]))


def _by_kernel(x: Array, kernel: Array, contract: int) -> Array:
    """On a CPU bfloat16 is multiplied as `_product` says, and two rows of float32 one by one.

    For two at once XLA's CPU backend (of jax 0.10.2, without YNNPACK) takes longer than twice for one: by a tenth
    where the weights come from memory, twice as long where they are in its cache.
    """
    batch = x.shape[: x.ndim - contract]
    if x.dtype == jnp.bfloat16 and for_cpu():
        inner = math.prod(x.shape[len(batch) :])
        y = _rounded(x.reshape(math.prod(batch), inner), kernel.reshape(inner, -1))
        return y.reshape(*batch, *kernel.shape[contract:])
    axes = range(len(batch), x.ndim), range(contract)
    whole = partial(jax.lax.dot_general, dimension_numbers=(axes, ((), ())))
    if math.prod(batch) != 2:
        return whole(x, kernel)

    def apart(x: Array, kernel: Array) -> Array:
        axis = batch.index(2)
        return jnp.concatenate([whole(row, kernel) for row in jnp.split(x, 2, axis)], axis)

    return jax.lax.platform_dependent(x, kernel, cpu=apart, default=whole)


def _product(x: Float[Array, "R D"], kernel: Float[Array, "D F"]) -> Float[Array, "R F"]:
    """A product of two matrices in float32, rounded: so YNNPACK takes factors of bfloat16 as they are.

    For a result in bfloat16 XLA (of jax 0.10.2, no longer of 0.12) makes float32 of both first, the kernel included,
    and several axes of rows it has multiplied as a batch of products.
    """
    return jax.lax.dot(x, kernel, preferred_element_type=jnp.float32).astype(x.dtype)


def _gradient(factors: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array]:
    """Of products of bfloat16 again, where jax would multiply a cotangent in float32."""
    x, kernel = factors
    return _product(cotangent, kernel.T), _product(x.T, cotangent)


_rounded = jax.custom_vjp(_product)
_rounded.defvjp(lambda x, kernel: (_product(x, kernel), (x, kernel)), _gradient)

"""Dense layers, and how a CPU multiplies the few rows of a round by their kernels."""

import math
from functools import partial
from typing import cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from models.config import LayerConfig
from specjax.parallel.mesh import for_cpu


class Projection(nn.Module):
    """A dense layer over the last `contract` axes of its input: [*batch, *in] -> [*batch, *features].

    Its kernel [*in, *features] carries logical axis names.
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
        y = _by_kernel(x.astype(c.dtype), kernel, contract)
        if self.bias:
            bias = self._parameter("bias", nn.initializers.zeros, self.axes[contract:], features)
            y += bias.reshape((1,) * len(batch) + features)
        return y

    def _parameter(
        self, name: str, init: nn.initializers.Initializer, axes: tuple[str | None, ...], shape: tuple[int, ...]
    ) -> Array:
        boxed = nn.with_logical_partitioning(init, axes)
        return cast(Array, self.param(name, boxed, shape, jnp.dtype(self.config.param_dtype))).astype(self.config.dtype)


def by_table(x: Float[Array, "*batch D"], table: Float[Array, "V D"]) -> Float[Array, "*batch V"]:
    """Multiply by the transpose of an embedding table, as a tied vocabulary head does."""
    if not for_cpu():
        return x @ table.T
    if x.dtype == jnp.bfloat16:
        axes = ((x.ndim - 1,), (1,)), ((), ())
        return jax.lax.dot_general(x, table, axes, preferred_element_type=jnp.float32).astype(x.dtype)
    # A loop then transposes the table once, before its first trip. Without the barrier XLA multiplies by the table as
    # it is, which takes Eigen ten times as long.
    return _by_kernel(x, jax.lax.optimization_barrier(table.T), 1)


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

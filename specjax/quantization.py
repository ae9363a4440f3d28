"""Matrices in 8 bits for the rollout's copy of a network: weights alone, one scale for each output channel.

The copy is made once per step from the master weights. Products read 8 bits per weight and multiply in the compute
dtype. A draft in 8 bits changes nothing but acceptance. A policy in 8 bits is another sampling law than the one that is
trained: the log-probs `mu` of the rollout are its own, and the loss corrects for it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from specjax import kernels
from specjax.param_labels import contracted_axes
from specjax.types import EightBit, PyTree, pytree

# dtype, and its largest number.
_FORMATS = {"int8": (jnp.int8, 127.0), "fp8": (jnp.float8_e4m3fn, 448.0)}

# The scale of a smaller weight could be subnormal, which XLA flushes to 0: values would be infinite.
_SMALLEST = 1e-34


@pytree
class QuantizedKernel:
    """A kernel in 8 bits, values * scale.

    values: int8 or float8_e4m3fn, [*in, *features].
    scale:  float32 [*features].
    """

    values: Shaped[Array, "..."]
    scale: Float[Array, "..."]


def quantize(kernel: Float[Array, "..."], contract: int, to: EightBit) -> QuantizedKernel:
    """Return a kernel [*in, *features] in 8 bits; `contract` is the number of its input axes.

    The largest weight of an output channel becomes the largest number of the format, if it is at least `_SMALLEST`.
    """
    dtype, largest = _FORMATS[to]
    kernel = kernel.astype(jnp.float32)
    most = jnp.max(jnp.abs(kernel), axis=tuple(range(contract)))
    scale = jnp.maximum(most, _SMALLEST) / largest
    values = kernel / jnp.expand_dims(scale, tuple(range(contract)))
    return QuantizedKernel((jnp.round(values) if to == "int8" else values).astype(dtype), scale)


def project(x: Float[Array, "..."], kernel: Array | QuantizedKernel, contract: int = 1) -> Float[Array, "..."]:
    """Multiply [*batch, *in] by a kernel [*in, *features] over its first `contract` axes, in the dtype of x."""
    if isinstance(kernel, QuantizedKernel):
        return kernels.matmul_quantized(x, kernel.values, kernel.scale, contract)
    return kernels.matmul(x, kernel.astype(x.dtype), contract)


def rollout_copy(params: PyTree, dtype: jnp.dtype, to: EightBit | None) -> PyTree:
    """Cast the parameters of a network to its compute dtype, and its kernels to 8 bits unless `to` is None."""
    if to is None:
        return jax.tree.map(lambda x: x.astype(dtype), params)
    return map_kernels(lambda x, contract: quantize(x, contract, to), lambda x: x.astype(dtype), params)


def map_kernels(of_kernel: Callable[[Any, int], Any], of_other: Callable[[Any], Any], params: PyTree) -> PyTree:
    """Map `of_kernel` over the kernels of a network and the number of axes each contracts, `of_other` over the rest."""
    axes = contracted_axes(params)
    return jax.tree.map(lambda x, contract: of_kernel(x, contract) if contract else of_other(x), params, axes)

"""Matrices in 8 bits: only weights, one scale for each output channel. Products multiply in the compute dtype.

All kernels of a network are quantized, its vocabulary head included; embeddings, and with them a head that is tied to
them, norms, routers and experts are not. There are two uses:

- The rollout's copy, made once per step from the master weights. A draft in 8 bits changes nothing but acceptance. A
  policy in 8 bits is another sampling law than the one that is trained: the log-probs `mu` of the rollout are its own,
  and the loss corrects for it.
- The frozen base of a policy with adapters (specjax.adapters), quantized once. Rollouts and training read the same
  8 bits, so there is only one law.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
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

    @property
    def ndim(self) -> int:
        """Return the number of axes of the kernel."""
        return self.values.ndim

    def dequantized(self) -> Float[Array, "..."]:
        """Return the kernel in float32."""
        inputs = tuple(range(self.values.ndim - self.scale.ndim))
        return self.values.astype(jnp.float32) * jnp.expand_dims(self.scale, inputs)


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
    """Cast the parameters of a network to its compute dtype, and its kernels to 8 bits unless `to` is None.

    Kernels that are in 8 bits already stay as they are, and so do scalars, such as the scale of an adapter.
    """

    def copied(x: Array | QuantizedKernel, contract: int) -> Array | QuantizedKernel:
        if isinstance(x, QuantizedKernel):
            return x
        return x.astype(dtype) if to is None else quantize(x, contract, to)

    return map_kernels(copied, lambda x: x.astype(dtype) if x.ndim else x, params)


def map_kernels(of_kernel: Callable[[Any, int], Any], of_other: Callable[[Any], Any], params: PyTree) -> PyTree:
    """Map `of_kernel` over the kernels of a network and the number of axes each contracts, `of_other` over the rest.

    Kernels may be arrays, their shapes, or in 8 bits.
    """
    axes = contracted_axes(params)
    return jax.tree.map(
        lambda contract, x: of_kernel(x, contract) if contract else of_other(x),
        axes,
        params,
    )


def quantized(params: PyTree, to: EightBit) -> PyTree:
    """Return the parameters of a network with its kernels in 8 bits, each sharded as it was.

    Kernels are quantized one by one, and each is deleted after that: the tree that was given must not be used again.
    Of ShapeDtypeStructs it returns ShapeDtypeStructs, and allocates nothing.
    """

    def convert(x: Array | jax.ShapeDtypeStruct, contract: int) -> QuantizedKernel:
        layout = kernel_layout(x.sharding, contract)
        if isinstance(x, jax.ShapeDtypeStruct):
            shapes = jax.eval_shape(partial(quantize, contract=contract, to=to), x)
            return jax.tree.map(lambda shape, sharding: shape.update(sharding=sharding), shapes, layout)
        kernel = jax.jit(quantize, static_argnums=(1, 2), out_shardings=layout)(x, contract, to)
        # Not by donation, which needs an output of the same size.
        jax.block_until_ready(kernel)
        x.delete()
        return kernel

    return map_kernels(convert, lambda x: x, params)


def kernel_layout(sharding: Any, contract: int) -> QuantizedKernel:
    """Return the shardings of a kernel in 8 bits whose values have this one; None for both without a mesh."""
    if not isinstance(sharding, NamedSharding):
        return QuantizedKernel(None, None)  # pyright: ignore[reportArgumentType]
    scale = NamedSharding(sharding.mesh, P(*sharding.spec[contract:]))
    return QuantizedKernel(sharding, scale)  # pyright: ignore[reportArgumentType]


def dequantized(params: PyTree) -> PyTree:
    """Return the parameters with kernels in 8 bits multiplied out in float32, and all others as they are."""

    def multiply(x: Any, contract: int) -> Any:
        return x.dequantized() if isinstance(x, QuantizedKernel) else x

    return map_kernels(multiply, lambda x: x, params)

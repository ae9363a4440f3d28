"""Layers that decoders and draft heads share: dense layers, norms, rotary attention, SwiGLU."""

from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models.config import LayerConfig
from models.rope import Rotation, rope, rotation
from specjax import cache as kv
from specjax import kernels
from specjax.adapters import SCALE, A, B
from specjax.cache import View
from specjax.drafters.training_time_test import attend_pass
from specjax.parallel.mesh import constrain, gather_weights
from specjax.quantization import QuantizedKernel, project
from specjax.types import LayerCache


class Projection(nn.Module):
    """Dense layer over the last `contract` axes of its input: [*batch, *in] -> [*batch, *features].

    An adapter among its parameters (specjax.adapters) adds its product.

    Attributes:
        config: Dtypes of the compute and of the parameters.
        features: Sizes of the output axes.
        axes: Logical axis names of the kernel [*in, *features]; the bias has the axes of the features.
        contract: Number of input axes that the kernel contracts.
        bias: Whether to add a bias.
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
        if isinstance(kernel, QuantizedKernel):
            values, scale = (
                gather_weights(kernel.values, *self.axes),
                gather_weights(kernel.scale, *self.axes[contract:]),
            )
            kernel = QuantizedKernel(values, scale)
        else:
            kernel = gather_weights(kernel.astype(c.dtype), *self.axes)
        x = x.astype(c.dtype)
        y = project(x, kernel, contract)
        if self.has_variable("params", A):
            y += self._adapted(x)
        if self.bias:
            bias = self._parameter("bias", nn.initializers.zeros, self.axes[contract:], features).astype(c.dtype)
            y += bias.reshape((1,) * len(batch) + features)
        return y

    def _adapted(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return s (x A) B. A and B are rounded to the compute dtype first, as in the rollout's copy; s is not."""
        a, b = (self.get_variable("params", name).astype(self.config.dtype) for name in (A, B))
        into, out = self.axes[: self.contract], self.axes[self.contract :]
        low = kernels.matmul(x, gather_weights(a, *into, None), self.contract).astype(jnp.float32)
        low = (low * self.get_variable("params", SCALE)).astype(x.dtype)
        return kernels.matmul(low, gather_weights(b, None, *out))

    def _parameter(
        self, name: str, init: nn.initializers.Initializer, axes: tuple[str | None, ...], shape: tuple[int, ...]
    ) -> Any:
        boxed = nn.with_logical_partitioning(init, axes)
        return self.param(name, boxed, shape, jnp.dtype(self.config.param_dtype))


class RMSNorm(nn.Module):
    """RMS norm over the last axis, x / rms(x) * scale, in float32.

    flax's own mixes dtypes, which strict promotion refuses.
    """

    config: LayerConfig

    @nn.compact
    def __call__(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        init = nn.with_logical_partitioning(nn.initializers.ones, ("norm",))
        scale = cast(Array, self.param("scale", init, x.shape[-1:], jnp.dtype(self.config.param_dtype)))
        wide = x.astype(jnp.float32)
        wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.config.norm_eps)
        # Round to the compute dtype first, like the rollout's copy of the parameters: both forwards are one policy.
        scale = scale.astype(self.config.dtype).astype(jnp.float32)
        return (wide * jnp.expand_dims(scale, range(x.ndim - 1))).astype(self.config.dtype)


class Attention(nn.Module):
    """Grouped-query attention: (x, cache or None, view, turn) -> (output [B, T, hidden_size], cache with x written).

    turn: rotation of all T tokens, from `rotation_of`.
    returned_at: int32 [B, N], the only tokens of each row to return: output [B, N, ..]. The cache gets all T tokens.
    """

    config: LayerConfig

    def setup(self) -> None:
        c = self.config
        shape, axes = (c.num_kv_heads, c.head_dim), ("embed", "kv_heads", None)
        self.q = Projection(c, (c.num_heads, c.head_dim), ("embed", "heads", None), bias=c.qkv_bias)
        self.k = Projection(c, shape, axes, bias=c.qkv_bias)
        self.v = Projection(c, shape, axes, bias=c.qkv_bias)
        if c.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(c), RMSNorm(c)
        self.o = Projection(c, c.hidden_size, ("heads", None, "embed"), contract=2)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        cache: LayerCache | None,
        view: View,
        turn: Rotation,
        returned_at: Int[Array, "B N"] | None = None,
    ) -> tuple[Float[Array, "B N H"], LayerCache | None]:
        queried, query_turn, mask, start, at = x, turn, view.mask, view.write if view.prefix else None, view.at
        if returned_at is not None:
            queried, query_turn, at = kv.tokens_at(x, returned_at), turn.at(returned_at), returned_at
            if mask is not None:
                mask, start = kv.tokens_at(mask, returned_at), None
        q = self.q(queried)
        if self.config.qk_norm:
            q = self.q_norm(q)
        q = rope(q, query_turn)
        k, v = self._keys_values(x, turn)
        if cache is not None and view.write is not None:
            cache = kv.write(cache, k, v, view.write)
        if not view.rows:
            if cache is None or mask is None:
                raise ValueError("View: rows = False: needs a cache and a mask")
            y = kernels.attend(q, cache, mask, start)
        elif view.depth:
            assert cache is not None
            y = attend_pass(q, cache, view)
        elif view.shared is not None:
            y = kernels.attend_packed(q, k, v, view.shared, view.window)
        else:
            y = kernels.attend_rows(q, k, v, window=view.window, at=at)
        return constrain(self.o(y), "batch", None, None), cache

    def write(self, x: Float[Array, "B T D"], cache: LayerCache, start: Int[Array, "B"], turn: Rotation) -> LayerCache:
        """Return the cache with the keys and values of x at start, .. of each row."""
        return kv.write(cache, *self._keys_values(x, turn), start)

    def _keys_values(self, x: Float[Array, "B T D"], turn: Rotation) -> tuple[Array, Array]:
        k = self.k(x)
        return rope(self.k_norm(k) if self.config.qk_norm else k, turn), self.v(x)


def rotation_of(config: LayerConfig, positions: Int[Array, "B T"]) -> Rotation:
    """Return the rotation that all layers of a network share. Computed per layer, XLA (jax 0.10.2) may repeat it."""
    return rotation(positions, config.head_dim, config.rope_theta, config.rope_scaling)


class SwiGLU(nn.Module):
    """Gated MLP: down(silu(gate(x)) * up(x))."""

    config: LayerConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        c = self.config
        gate = Projection(c, c.intermediate_size, ("embed", "mlp"), name="gate")(x)
        up = Projection(c, c.intermediate_size, ("embed", "mlp"), name="up")(x)
        down = Projection(c, c.hidden_size, ("mlp", "embed"), name="down")
        return constrain(down(nn.silu(gate) * up), "batch", None, None)


def init_cache(config: LayerConfig, rows: int, length: int) -> LayerCache:
    """Return an empty cache for one layer, its heads sharded like the projections."""
    layer = kv.empty(rows, length, config.num_kv_heads, config.head_dim, jnp.dtype(config.dtype))
    return LayerCache(*(constrain(x, "batch", "kv_heads", None, None) for x in layer))

"""The parts that decoders and draft heads share: projections, rotary attention, SwiGLU."""

import math
from functools import partial
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.lax import DotDimensionNumbers
from jaxtyping import Array, Float, Int

from models.config import LayerConfig
from models.rope import rope
from specjax import cache as kv
from specjax.cache import View
from specjax.mesh import constrain
from specjax.types import LayerCache
from specjax.unrolled import attend_unrolled


def projection(
    config: LayerConfig,
    features: int | tuple[int, ...],
    axes: tuple[str | None, ...],
    *,
    contract: int | tuple[int, ...] = -1,
    bias: bool = False,
    name: str | None = None,
) -> nn.DenseGeneral:
    """A dense layer over the `contract` axes of its input, whose kernel carries logical axis names."""
    init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", in_axis=0, out_axis=-1)
    return nn.DenseGeneral(
        features,
        axis=contract,
        use_bias=bias,
        dtype=jnp.dtype(config.dtype),
        param_dtype=jnp.dtype(config.param_dtype),
        kernel_init=nn.with_logical_partitioning(init, axes),
        bias_init=nn.with_logical_partitioning(nn.initializers.zeros, axes[1:]),
        dot_general=_dot_general,
        name=name,
    )


def _dot_general(x: Array, kernel: Array, dimensions: DotDimensionNumbers, **options: Any) -> Array:
    """`jax.lax.dot_general` of a dense layer; on a CPU two rows one by one.

    XLA's CPU backend (of jax 0.10.2, without YNNPACK) takes longer for two rows than twice for one: by a tenth where
    the weights come from memory, twice as long where they are in its cache.
    """
    whole = partial(jax.lax.dot_general, dimension_numbers=dimensions, **options)
    (contract, _), _ = dimensions
    batch = x.shape[: x.ndim - len(contract)]
    if math.prod(batch) != 2:
        return whole(x, kernel)

    def apart(x: Array, kernel: Array) -> Array:
        axis = batch.index(2)
        return jnp.concatenate([whole(row, kernel) for row in jnp.split(x, 2, axis)], axis)

    return jax.lax.platform_dependent(x, kernel, cpu=apart, default=whole)


class RMSNorm(nn.Module):
    """x / rms(x) * scale over the last axis, in float32. (flax's own mixes dtypes, which strict promotion refuses.)"""

    config: LayerConfig

    @nn.compact
    def __call__(self, x: Float[Array, "*batch d"]) -> Float[Array, "*batch d"]:
        init = nn.with_logical_partitioning(nn.initializers.ones, ("norm",))
        scale = cast(Array, self.param("scale", init, x.shape[-1:], jnp.dtype(self.config.param_dtype)))
        wide = x.astype(jnp.float32)
        wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.config.norm_eps)
        # Rounded to the compute dtype first, as the rollout's copy of the parameters is: both forwards are one policy.
        scale = scale.astype(self.config.dtype).astype(jnp.float32)
        return (wide * jnp.expand_dims(scale, range(x.ndim - 1))).astype(self.config.dtype)


class Attention(nn.Module):
    """Grouped-query attention: (x, cache or None, view) -> (output [B, T, hidden_size], the cache with x written).

    only: int32 [B], the one token of each row whose output is wanted, of those that are written: output [B, 1, ..].
    """

    config: LayerConfig

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        cache: LayerCache | None,
        view: View,
        only: Int[Array, "B"] | None = None,
    ) -> tuple[Float[Array, "B N H"], LayerCache | None]:
        c = self.config
        asking, seen = (x, view) if only is None else (kv.token_at(x, only), view.at(only))
        shape, axes = (c.num_kv_heads, c.head_dim), ("embed", "kv_heads", None)
        q = projection(c, (c.num_heads, c.head_dim), ("embed", "heads", None), bias=c.qkv_bias, name="q")(asking)
        k = projection(c, shape, axes, bias=c.qkv_bias, name="k")(x)
        v = projection(c, shape, axes, bias=c.qkv_bias, name="v")(x)
        if c.qk_norm:
            q, k = RMSNorm(c, name="q_norm")(q), RMSNorm(c, name="k_norm")(k)
        q = rope(q, seen.positions, c.rope_theta, c.rope_scaling)
        k = rope(k, view.positions, c.rope_theta, c.rope_scaling)
        if cache is not None and view.write is not None:
            cache = kv.write(cache, k, v, view.write)
            y = attend_unrolled(q, cache, view.window) if seen.mask is None else kv.attend(q, cache, seen.mask)
        else:
            # In bfloat16 jax's attention promotes to float32 inside, which strict promotion refuses.
            with jax.numpy_dtype_promotion("standard"):
                window = None if view.window is None else (view.window - 1, 0)
                y = jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=window)
        out = projection(c, c.hidden_size, ("heads", None, "embed"), contract=(-2, -1), name="o")
        return constrain(out(y), "batch", None, None), cache


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    config: LayerConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        c = self.config
        gate = projection(c, c.intermediate_size, ("embed", "mlp"), name="gate")(x)
        up = projection(c, c.intermediate_size, ("embed", "mlp"), name="up")(x)
        down = projection(c, c.hidden_size, ("mlp", "embed"), name="down")
        return constrain(down(nn.silu(gate) * up), "batch", None, None)


def init_cache(config: LayerConfig, rows: int, length: int) -> LayerCache:
    """An empty cache of one layer, its heads sharded as its projections are."""
    layer = kv.empty(rows, length, config.num_kv_heads, config.head_dim, jnp.dtype(config.dtype))
    return LayerCache(*(constrain(x, "batch", "kv_heads", None, None) for x in layer))

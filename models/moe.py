"""Mixture of experts in place of an MLP (Qwen3-MoE): the router, and three ways to compute the experts of its choice.

Experts are split over the mesh axis `expert`, and the width of each over `tensor`. Every device computes the part of
its own experts for all tokens of its data shard, and one sum over both axes adds the parts.
"""

from typing import NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Integer

from models.config import ExpertsConfig, LayerConfig
from specjax import kernels
from specjax.parallel.mesh import AXES, MODEL_AXES, constrain, gather_weights, spec
from specjax.types import Routing

# Most tokens of a forward with a cache for which every expert computes every token. Up to about as many, reading the
# weights takes longer than multiplying (H100: 295 operations a byte), and XLA reads them once, without copies.
MOST_DENSE = 256
# Gathering the experts of a few tokens reads them, writes a copy and reads it: three times the bytes of an expert.
GATHER_COST = 3


class Weights(NamedTuple):
    """Weights of the experts on one device: gate, up [E, D, F] and down [E, F, D]."""

    gate: Array
    up: Array
    down: Array


class MoE(nn.Module):
    """Mixture of SwiGLU experts: (x, routes or None) -> (y, what the router computed).

    routes: int [B, T, A], experts to use in place of those that the router chooses; their weights are the router's.
    decoding: whether the forward has a cache. Training always sorts tokens by expert.
    """

    config: LayerConfig
    experts: ExpertsConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "B T D"], routes: Integer[Array, "B T A"] | None, *, decoding: bool
    ) -> tuple[Float[Array, "B T D"], Routing]:
        c, e = self.config, self.experts
        router = _parameter(self, "router", ("embed", None), (c.hidden_size, e.num_experts))
        scores = jnp.einsum("btd,de->bte", x, router, preferred_element_type=jnp.float32)
        probs = jax.nn.softmax(scores, axis=-1)
        chosen = jax.lax.top_k(probs, e.active)[1]
        used = chosen if routes is None else routes.astype(jnp.int32)
        share = jnp.take_along_axis(probs, used, axis=-1)
        if e.norm_topk_prob:
            share /= jnp.sum(share, axis=-1, keepdims=True)
        weights = Experts(c, e, name="experts")()
        y = _over_mesh(x, share, used, weights, decoding)
        return constrain(y, "batch", None, None), Routing(chosen, probs)


class Experts(nn.Module):
    """The weights of all experts of a layer, stacked."""

    config: LayerConfig
    experts: ExpertsConfig

    @nn.compact
    def __call__(self) -> Weights:
        c, e = self.config, self.experts
        into, out = ("experts", "embed", "expert_mlp"), ("experts", "expert_mlp", "embed")
        wide = (e.num_experts, c.hidden_size, e.intermediate_size)
        return Weights(
            gate=_parameter(self, "gate", into, wide),
            up=_parameter(self, "up", into, wide),
            down=_parameter(self, "down", out, (e.num_experts, e.intermediate_size, c.hidden_size)),
        )


def _parameter(
    module: "MoE | Experts", name: str, axes: tuple[str | None, ...], shape: tuple[int, ...]
) -> Float[Array, "..."]:
    """Return a matrix or a stack of matrices in the compute dtype."""
    batch = len(shape) - 2
    init = nn.initializers.variance_scaling(
        *(1.0, "fan_in", "truncated_normal"), in_axis=batch, out_axis=batch + 1, batch_axis=tuple(range(batch))
    )
    boxed, config = nn.with_logical_partitioning(init, axes), module.config
    # Rounded to the compute dtype first, like the rollout's copy: both forwards are one policy.
    weights = cast(Array, module.param(name, boxed, shape, jnp.dtype(config.param_dtype)))
    return gather_weights(weights.astype(config.dtype), *axes)


def _over_mesh(
    x: Float[Array, "B T D"], share: Float[Array, "B T A"], used: Int[Array, "B T A"], weights: Weights, decoding: bool
) -> Float[Array, "B T D"]:
    """Return the weighted sum of the experts' outputs, computed where their weights are.

    The compiler would gather sorted tokens or weights. So the region is manual over all axes that are not yet.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return _local(x, share, used, weights, 0, decoding)

    def part(x: Array, share: Array, used: Array, weights: Weights) -> Array:
        first = jax.lax.axis_index("expert") * len(weights.gate)
        return jax.lax.psum(_local(x, share, used, weights, first, decoding), MODEL_AXES)

    rows, into = spec(("batch", None, None), x.shape, mesh), P("expert", None, "tensor")
    return jax.shard_map(
        part,
        mesh=mesh,
        in_specs=(rows, rows, rows, Weights._make((into, into, P("expert", "tensor", None)))),
        out_specs=rows,
        axis_names=set(AXES) - set(mesh.manual_axes),
        # With the check, gradients were wrong by their own size (jax 0.10.2, on CPUs).
        check_vma=False,
    )(x, share, used, weights)


def _local(
    x: Float[Array, "B T D"],
    share: Float[Array, "B T A"],
    used: Int[Array, "B T A"],
    weights: Weights,
    first: Int[Array, ""] | int,
    decoding: bool,
) -> Float[Array, "B T D"]:
    """Return what the experts `first`, first + 1, .. of these weights add to the weighted sum."""
    tokens, active, experts = x.shape[0] * x.shape[1], used.shape[2], len(weights.gate)
    rows, share, used = (each.reshape(tokens, -1) for each in (x, share, used - first))
    mine = (used >= 0) & (used < experts)
    if not decoding or tokens > MOST_DENSE:
        compute = _sorted
    else:
        compute = _gathered if GATHER_COST * tokens * active < experts else _dense
    # Experts of other devices count as one more, which adds nothing.
    y = compute(rows, jnp.where(mine, share, 0.0), jnp.where(mine, used, experts), weights)
    return y.astype(x.dtype).reshape(x.shape)


def _gathered(x: Float[Array, "N D"], share: Float[Array, "N A"], used: Int[Array, "N A"], weights: Weights) -> Array:
    """Multiply each token by copies of its experts."""
    copies = Weights(*(each.at[used].get(mode="clip") for each in weights))
    hidden = nn.silu(jnp.einsum("nd,nadf->naf", x, copies.gate)) * jnp.einsum("nd,nadf->naf", x, copies.up)
    return jnp.einsum("naf,nafd->nd", _weighted(hidden, share), copies.down)


def _dense(x: Float[Array, "N D"], share: Float[Array, "N A"], used: Int[Array, "N A"], weights: Weights) -> Array:
    """Multiply each token by every expert. From some 32 tokens on, nearly every expert is needed anyway."""
    experts = len(weights.gate)
    share = jnp.sum(jax.nn.one_hot(used, experts, dtype=share.dtype) * share[..., None], axis=1)
    hidden = nn.silu(jnp.einsum("nd,edf->enf", x, weights.gate)) * jnp.einsum("nd,edf->enf", x, weights.up)
    return jnp.einsum("enf,efd->nd", _weighted(hidden, share.T), weights.down)


def _sorted(x: Float[Array, "N D"], share: Float[Array, "N A"], used: Int[Array, "N A"], weights: Weights) -> Array:
    """Sort copies of the tokens by expert, and multiply each group by its expert.

    Their number is static: on every device as many rows as all experts have, rows for other devices last.
    """
    (tokens, active), experts = used.shape, len(weights.gate)
    order = jnp.argsort(used.ravel())
    back = jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=order.dtype), unique_indices=True)
    sizes = jnp.sum(used.ravel()[:, None] == jnp.arange(experts)[None], axis=0, dtype=jnp.int32)
    # Copies first, then a permutation: the gradient of neither adds in an order that could change.
    rows = _permuted(jnp.repeat(x, active, axis=0), order)
    hidden = nn.silu(kernels.grouped(rows, weights.gate, sizes)) * kernels.grouped(rows, weights.up, sizes)
    y = kernels.grouped(_weighted(hidden, _permuted(share.ravel(), order)), weights.down, sizes)
    return jnp.sum(_permuted(y, back).reshape(tokens, active, -1), axis=1)


def _permuted(x: Array, order: Int[Array, "rows"]) -> Array:
    return x.at[order].get(unique_indices=True)


def _weighted(hidden: Float[Array, "*rows F"], share: Float[Array, "*rows"]) -> Array:
    return (hidden.astype(share.dtype) * share[..., None]).astype(hidden.dtype)

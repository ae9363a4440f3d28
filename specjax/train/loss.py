"""The policy's loss per token, and the weight of each token, so that microbatches and shards can be summed.

A loss is a function `LossFn`; `policy_loss` is the built-in one. It covers the GRPO family with four choices: the
ratio, the surrogate, the weighting of tokens, and the correction for a generating policy other than the trained one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from specjax.options import Factor, Options, Weight, above, at_most
from specjax.types import pytree

# Log-ratios are clipped to this magnitude: a single ratio that overflows would make the whole gradient NaN.
FARTHEST = 20.0

Aggregate = Literal["token", "sequence", "budget"]


@dataclass(frozen=True)
class LossConfig(Options):
    """The surrogate of the policy gradient. All ratios are of probabilities under temperature alone.

    Attributes:
        ratio:            theta / old per token, or its geometric mean over the sequence (GSPO, arXiv 2507.18071,
                          equation 7).
        surrogate:        clipped (PPO, arXiv 1707.06347), or cispo: the clipped ratio weighs the log-prob (arXiv
                          2506.13585).
        clip_low:         Clip the ratio below 1 - clip_low; 1: no lower clip.
        clip_high:        Clip the ratio above 1 + clip_high.
        dual_clip:        Bound at negative advantages (arXiv 1912.09729).
        aggregate:        Equal weight per token (DAPO), per sequence (GRPO), or 1 / max_new_tokens (Dr. GRPO).
        importance:       Weight old / mu: per token, per sequence (product), or icepop (arXiv 2510.18855): 0 outside
                          floor .. cap. 1 with several updates and no recompute_old.
        importance_cap:   Upper bound of that weight. None: no weight.
        importance_floor: Lower bound for icepop.
        kl_estimator:     Estimator of KL(theta || reference) (Schulman 2020). In a loss, k2 has the right gradient.
        kl_coefficient:   Weight of KL; 0 needs no reference policy.
        kl_in:            In the loss; in the reward of a sequence (RLOO); or in that of each token (REINFORCE++).
        router_aux_loss_coef: Weight of a mixture of experts' load-balance loss.
        routing:          Experts: recompute them, or replay the rollout's.
    """

    ratio: Literal["token", "sequence"] = "token"
    surrogate: Literal["clipped", "cispo"] = "clipped"
    clip_low: Weight = 0.2
    clip_high: Weight = 0.28
    dual_clip: Annotated[float, above(1), at_most(1e6)] | None = None
    aggregate: Aggregate = "token"
    importance: Literal["token", "sequence", "icepop"] = "token"
    importance_cap: Factor | None = 2.0
    importance_floor: Weight = 0.5
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_coefficient: Weight = 0.0
    kl_in: Literal["loss", "reward", "token"] = "loss"
    router_aux_loss_coef: Weight = 0.0
    routing: Literal["recompute", "replay"] = "recompute"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dual_clip is not None and self.surrogate != "clipped":
            raise ValueError(f"dual_clip = {self.dual_clip}: must be none with surrogate {self.surrogate}")
        if self.importance == "icepop" and self.importance_cap is None:
            raise ValueError("importance_cap = None: must be given with importance icepop")
        if self.importance == "icepop" and self.importance_floor > (self.importance_cap or 0.0):
            raise ValueError(
                f"importance_floor = {self.importance_floor}: must be at most importance_cap = {self.importance_cap}"
            )
        if self.in_reward and not self.kl_coefficient:
            raise ValueError(f"kl_in = {self.kl_in}: must be loss without a kl_coefficient")

    @property
    def in_reward(self) -> bool:
        """Return whether KL is subtracted from the reward."""
        return self.kl_in != "loss"

    @property
    def by_sequence(self) -> bool:
        """Return whether the ratio or the importance weight is that of a whole sequence."""
        return self.ratio == "sequence" or (self.importance == "sequence" and self.importance_cap is not None)


@pytree
class LossInputs:
    """Inputs of a loss for a microbatch of whole completions, from their first token; all are 0 outside the mask.

    theta:     float32 [B, T], log-prob of each token under the policy being trained, temperature alone.
    old:       float32 [B, T], its log-prob under the anchor of the ratio.
    mu:        float32 [B, T], its log-prob under the policy that generated it.
    reference: float32 [B, T], its log-prob under the reference policy; None without one.
    advantage: float32 [B, T].
    mask:      bool [B, T], the tokens that are trained on.
    """

    theta: Float[Array, "B T"]
    old: Float[Array, "B T"]
    mu: Float[Array, "B T"]
    reference: Float[Array, "B T"] | None
    advantage: Float[Array, "B T"]
    mask: Bool[Array, "B T"]


class LossOutput(NamedTuple):
    """Result of a loss; nothing outside the mask is read.

    loss:    float32 [B, T], the loss of each token, to be weighted by `token_weights` and summed.
    metrics: by name, [B, T] of any dtype; the mean over all trained tokens is logged as `loss/NAME`.
    """

    loss: Float[Array, "B T"]
    metrics: dict[str, Array]


LossFn = Callable[[LossInputs, LossConfig], LossOutput]


def policy_loss(inputs: LossInputs, config: LossConfig) -> LossOutput:
    """Return the loss of the GRPO family that `config` describes, and `clip_fraction`.

    A token counts as clipped if a clip of its ratio removes its gradient.
    """
    theta, old, advantage, mask = inputs.theta, inputs.old, inputs.advantage, inputs.mask
    log_ratio = theta - old
    if config.ratio == "sequence":
        log_ratio = jnp.broadcast_to(_mean(log_ratio, mask), mask.shape)
    ratio = jnp.exp(jnp.clip(log_ratio, -FARTHEST, FARTHEST))
    bounded = jnp.clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
    clipped = ratio * advantage > bounded * advantage
    if config.surrogate == "cispo":
        objective = jax.lax.stop_gradient(bounded) * advantage * theta
    else:
        objective = jnp.minimum(ratio * advantage, bounded * advantage)
        if config.dual_clip is not None:
            least = config.dual_clip * advantage
            clipped |= (advantage < 0) & (objective < least)
            objective = jnp.where(advantage < 0, jnp.maximum(objective, least), objective)
    loss = -objective * jax.lax.stop_gradient(_importance(old - inputs.mu, mask, config))
    if inputs.reference is not None and config.kl_in == "loss":
        loss += config.kl_coefficient * kl_estimate(theta, inputs.reference, config.kl_estimator)
    return LossOutput(loss, {"clip_fraction": clipped})


def per_token_loss(loss_fn: LossFn, inputs: LossInputs, config: LossConfig) -> LossOutput:
    """Return the result of `loss_fn` as float32 that is 0 outside the mask.

    Raises ValueError if the loss or a metric is not per token, or if a metric has the name of a built-in one.
    """
    output = loss_fn(inputs, config)
    if taken := {"policy", "draft"} & output.metrics.keys():
        raise ValueError(f"loss_fn: a metric is named {min(taken)}; policy and draft are built in")
    for name, x in {"loss": output.loss, **output.metrics}.items():
        if x.shape != inputs.mask.shape:
            raise ValueError(f"loss_fn: {name} has the shape {x.shape}; must be that of the mask, {inputs.mask.shape}")
    return jax.tree.map(lambda x: jnp.where(inputs.mask, x.astype(jnp.float32), 0.0), output)


def token_weights(mask: Bool[Array, "R T"], aggregate: Aggregate, budget: int) -> Float[Array, "R T"]:
    """Return the weight of each token of a whole batch in the loss, 0 outside the mask.

    The batch spans all shards and microbatches, so that every split of it gives the same gradient. A sequence without a
    token in the mask is not counted. budget: most tokens of a completion.
    """
    counts = mask.astype(jnp.float32)
    lengths = jnp.sum(counts, axis=1, keepdims=True)
    sequences = jnp.maximum(jnp.sum(lengths > 0, dtype=jnp.float32), 1.0)
    match aggregate:
        case "token":
            return counts / jnp.maximum(jnp.sum(lengths), 1.0)
        case "sequence":
            return counts / (jnp.maximum(lengths, 1.0) * sequences)
        case "budget":
            return counts / (sequences * budget)


def kl_estimate(
    theta: Float[Array, "*any"], reference: Float[Array, "*any"], estimator: Literal["k1", "k2", "k3"]
) -> Float[Array, "*any"]:
    """Estimate KL(theta || reference) from tokens of theta (Schulman 2020).

    k1 and k3 are unbiased, k2 and k3 never negative.
    """
    gap = reference - theta
    match estimator:
        case "k1":
            return -gap
        case "k2":
            return gap**2 / 2
        case "k3":
            return jnp.exp(jnp.minimum(gap, FARTHEST)) - gap - 1


def kl_cost(
    anchor: Float[Array, "R S"] | None,
    reference: Float[Array, "R S"] | None,
    completion: Bool[Array, "R S"],
    config: LossConfig,
) -> Float[Array, "R S"]:
    """Return the KL cost of each completion token against the reference policy, 0 elsewhere.

    anchor: log-probs that anchor the ratio, or else those that the tokens were generated with.
    """
    if anchor is None or reference is None:
        raise ValueError(f"kl_in = {config.kl_in}: the batch has no log-probs to compare")
    gaps = kl_estimate(anchor, reference, config.kl_estimator)
    return jnp.where(completion, config.kl_coefficient * gaps, 0.0)


def _importance(log_weight: Float[Array, "B T"], mask: Bool[Array, "B T"], config: LossConfig) -> Float[Array, "B T"]:
    """Return truncated importance weights. log_weight must be 0 outside the mask."""
    if config.importance_cap is None:
        return jnp.ones_like(log_weight)
    if config.importance == "sequence":
        log_weight = jnp.broadcast_to(jnp.sum(log_weight, axis=1, keepdims=True), mask.shape)
    weight = jnp.exp(log_weight)
    if config.importance == "icepop":
        inside = (weight >= config.importance_floor) & (weight <= config.importance_cap)
        return jnp.where(inside, weight, 0.0)
    return jnp.minimum(weight, config.importance_cap)


def _mean(x: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B 1"]:
    count = jnp.sum(mask, axis=1, keepdims=True, dtype=jnp.float32)
    return jnp.sum(x, axis=1, keepdims=True) / jnp.maximum(count, 1.0)

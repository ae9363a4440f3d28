"""The GRPO loss, token by token, as sums that microbatches and shards can add up."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


@dataclass(frozen=True)
class LossConfig:
    """The clipped GRPO loss. The bounds of the ratio are asymmetric: DAPO, arXiv 2503.14476.

    Attributes:
        clip_low:       the ratio is clipped from below at 1 - clip_low.
        clip_high:      the ratio is clipped from above at 1 + clip_high.
        importance_cap: ceiling of the truncated importance weight old / mu; None leaves the weight out.
        kl_coefficient: weight of the k3 estimate of KL(theta || reference); 0 needs no reference policy.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    importance_cap: float | None = 2.0
    kl_coefficient: float = 0.0

    def __post_init__(self) -> None:
        for name in ("clip_low", "clip_high", "kl_coefficient"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} = {getattr(self, name)}: must be >= 0")
        if self.importance_cap is not None and not self.importance_cap > 0:
            raise ValueError(f"importance_cap = {self.importance_cap}: must be > 0, or none")


class LossTerms(NamedTuple):
    """Per-token terms, float32 [B, T], 0 outside the mask."""

    loss: Float[Array, "B T"]
    clipped: Float[Array, "B T"]
    kl: Float[Array, "B T"]


def grpo_terms(
    theta: Float[Array, "B T"],
    old: Float[Array, "B T"],
    mu: Float[Array, "B T"],
    reference: Float[Array, "B T"] | None,
    advantage: Float[Array, "B"],
    mask: Bool[Array, "B T"],
    config: LossConfig,
) -> LossTerms:
    """The clipped surrogate of arXiv 2402.03300, equation 3, with a truncated importance weight.

    All log-probs are of the same tokens under temperature alone: `theta` of the policy being trained, `old` of the
    anchor of the ratio, `mu` of the policy that generated. `mask` marks the tokens that count. To be normalised by the
    global number of such tokens, so that any split into microbatches and shards has the same gradient.
    """
    theta, old, mu = (jnp.where(mask, x, 0.0) for x in (theta, old, mu))
    advantage = advantage[:, None]
    ratio = jnp.exp(theta - old)
    clipped_ratio = jnp.clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
    surrogate = jnp.minimum(ratio * advantage, clipped_ratio * advantage)
    if config.importance_cap is not None:
        surrogate *= jax.lax.stop_gradient(jnp.minimum(jnp.exp(old - mu), config.importance_cap))
    kl = jnp.zeros_like(theta) if reference is None else k3(theta, jnp.where(mask, reference, 0.0))
    clipped = (ratio * advantage > clipped_ratio * advantage).astype(jnp.float32)
    loss = config.kl_coefficient * kl - surrogate
    return LossTerms(*(jnp.where(mask, x, 0.0) for x in (loss, clipped, kl)))


def k3(theta: Float[Array, "..."], reference: Float[Array, "..."]) -> Float[Array, "..."]:
    """The unbiased, non-negative estimate of KL(theta || reference) on tokens of theta (Schulman 2020, "k3")."""
    gap = reference - theta
    return jnp.exp(gap) - gap - 1

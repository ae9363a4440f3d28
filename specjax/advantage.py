"""Group-relative advantages (GRPO, Shao et al. 2024, arXiv 2402.03300, section 4.1.2)."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


class Advantages(NamedTuple):
    """value: float32 [R], 0 where not scored. scored: bool [R]. zero_variance: bool [N], groups that teach nothing."""

    value: Float[Array, "R"]
    scored: Bool[Array, "R"]
    zero_variance: Bool[Array, "N"]


def group_advantages(reward: Float[Array, "R"], group_size: int, eps: float = 1e-6) -> Advantages:
    """(reward - mean) / (standard deviation + eps) over the scored samples of each group of consecutive sequences.

    A reward that is not finite is a failed score: that sequence gets 0 and leaves its group's statistics. A group
    whose scores are all equal gets 0 exactly: the rounding of its mean, divided by eps, would look like a lesson.
    """
    grouped = reward.reshape(-1, group_size)
    scored = jnp.isfinite(grouped)
    count = jnp.maximum(jnp.sum(scored, axis=1, keepdims=True, dtype=jnp.float32), 1.0)
    mean = jnp.sum(jnp.where(scored, grouped, 0.0), axis=1, keepdims=True) / count
    highest = jnp.max(grouped, axis=1, keepdims=True, where=scored, initial=-jnp.inf)
    lowest = jnp.min(grouped, axis=1, keepdims=True, where=scored, initial=jnp.inf)
    differs = highest > lowest
    centred = jnp.where(scored & differs, grouped - mean, 0.0)
    deviation = jnp.sqrt(jnp.sum(centred**2, axis=1, keepdims=True) / count)
    return Advantages((centred / (deviation + eps)).reshape(-1), scored.reshape(-1), ~differs[:, 0])

"""The metrics of a step, by the names that scripts rely on."""

import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool

from specjax.advantage import Advantages
from specjax.gradients import Sums
from specjax.types import Params, Reward, Rollout

Metrics = dict[str, Array]


def rollout_metrics(rollout: Rollout) -> Metrics:
    """What a rollout tells of itself; statistics that it does not carry are left out."""
    tokens = _total(rollout.lengths)
    metrics = {
        "rollout/tokens": tokens,
        "rollout/length_mean": tokens / len(rollout.lengths),
        "rollout/length_max": jnp.max(rollout.lengths),
    }
    if rollout.stopped is not None:
        metrics["rollout/truncated"] = _total(~rollout.stopped) / len(rollout.stopped)
    if rollout.trips is not None:
        metrics["rollout/rounds"] = jnp.max(jnp.sum(rollout.trips, axis=-1))
    if rollout.trips is not None and rollout.k is not None:
        metrics["rollout/draft_length"] = _total(rollout.trips * rollout.k) / jnp.maximum(_total(rollout.trips), 1.0)
    if rollout.rounds is not None:
        # The first token of a row comes from its prefill, not from a verification.
        verified = tokens - _total(rollout.lengths > 0)
        metrics["rollout/acceptance_length"] = verified / jnp.maximum(_total(rollout.rounds), 1.0)
    if rollout.accepted is not None and rollout.drafted is not None:
        rates = _total(rollout.accepted, axis=0) / jnp.maximum(_total(rollout.drafted, axis=0), 1.0)
        metrics |= {f"rollout/acceptance_rate_pos_{i + 1}": rate for i, rate in enumerate(rates)}
    return metrics


def reward_metrics(reward: Reward, advantages: Advantages) -> Metrics:
    """Statistics of the scored sequences."""
    scored = advantages.scored
    count = jnp.maximum(_total(scored), 1.0)
    mean = jnp.sum(jnp.where(scored, reward.value, 0.0)) / count
    variance = jnp.sum(jnp.where(scored, (reward.value - mean) ** 2, 0.0)) / count
    parts = {
        f"reward/{name}": jnp.sum(jnp.where(scored, part, 0.0)) / count for name, part in (reward.parts or {}).items()
    }
    return parts | {
        "reward/mean": mean,
        "reward/std": jnp.sqrt(variance),
        "reward/accuracy": jnp.sum(jnp.where(scored, reward.correct, 0.0)) / count,
        "reward/failed": jnp.sum(~scored),
        "groups/zero_variance": jnp.sum(advantages.zero_variance),
    }


def loss_metrics(
    sums: Sums,
    gradients: Params,
    *,
    with_draft: bool,
    train_draft: bool | Bool[Array, ""],
    with_reference: bool,
    with_mu: bool,
) -> Metrics:
    """Means over the tokens that each loss counts, and the norms of the gradients before clipping.

    What the step did not measure is left out, or NaN where only the running program knows of it: the gradient of a
    draft that was not trained. with_mu says that the rollout recorded its log-probs.
    """
    metrics = {
        "loss/policy": sums.policy_loss,
        "loss/clip_fraction": sums.clipped / sums.tokens,
        "entropy": sums.entropy / sums.tokens,
        "grad_norm/policy": optax.tree.norm(gradients.policy),
    }
    if with_mu:
        metrics["ratio/mean"] = sums.ratio / sums.tokens
        metrics["ratio/max"] = sums.ratio_max
        metrics["rollout/logprob_gap_mean"] = sums.gap / sums.tokens
        metrics["rollout/logprob_gap_max"] = sums.gap_max
    if with_reference:
        metrics["kl/reference"] = sums.kl / sums.tokens
    if with_draft:
        metrics["loss/draft"] = sums.draft_loss / sums.draft_tokens
        metrics["draft/predicted_acceptance"] = sums.overlap / sums.draft_tokens
    if train_draft is not False:
        metrics["grad_norm/draft"] = jnp.where(train_draft, optax.tree.norm(gradients.draft), jnp.nan)
    return metrics


def _total(x: Array, axis: int | None = None) -> Array:
    return jnp.sum(x, axis=axis, dtype=jnp.float32)

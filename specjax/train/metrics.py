"""The metrics of a step, by the names that scripts rely on."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from specjax.train.batch import Batch
from specjax.train.updates import Report
from specjax.types import Reward, Rollout

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
        # Nothing, or nothing but a stop token.
        metrics["rollout/empty"] = jnp.sum((rollout.lengths <= 1) & rollout.stopped)
    if rollout.loop_rounds is not None:
        metrics["rollout/rounds"] = jnp.max(jnp.sum(rollout.loop_rounds, axis=-1))
    if rollout.loop_rounds is not None and rollout.draft_length is not None:
        metrics["rollout/draft_length"] = _total(rollout.loop_rounds * rollout.draft_length) / jnp.maximum(
            _total(rollout.loop_rounds), 1.0
        )
    if rollout.row_rounds is not None:
        # The first token of a row comes from its prefill, not from a verification.
        verified = tokens - _total(rollout.lengths > 0)
        metrics["rollout/acceptance_length"] = verified / jnp.maximum(_total(rollout.row_rounds), 1.0)
    if rollout.accepted is not None and rollout.drafted is not None:
        rates = _total(rollout.accepted, axis=0) / jnp.maximum(_total(rollout.drafted, axis=0), 1.0)
        metrics |= {f"rollout/acceptance_rate_pos_{i + 1}": rate for i, rate in enumerate(rates)}
    return metrics


def reward_metrics(
    reward: Reward, equal: Bool[Array, "N"], counted: Bool[Array, "K"], punishment: Float[Array, "R"]
) -> Metrics:
    """Statistics of the scored sequences, NaN where there are none.

    equal: the groups of one reward. counted: of the sequences that selection kept, those that train the policy.
    punishment: what each sequence was given for its length, beside its reward.
    """
    scored = jnp.isfinite(reward.value)
    count = _total(scored)
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
        "reward/overlong": jnp.sum(jnp.where(scored, punishment, 0.0)) / count,
        "groups/zero_variance": jnp.sum(equal),
        "groups/sequences_trained": jnp.sum(counted),
    }


def update_metrics(
    seen: Report, batch: Batch, gap_alarm: float, *, with_draft: bool, train_draft: bool | Bool[Array, ""]
) -> Metrics:
    """Means over the tokens that each loss counts, and over updates the norms of the gradients before clipping.

    What the step did not measure is left out, or NaN where only the running program knows of it: the gradient of a
    draft that was not trained. What compares training with the rollout is of the first update, whose policy generated.
    """
    sums, first = seen.sums, seen.first
    metrics = {
        "loss/policy": sums.policy_loss / seen.updates,
        "loss/clip_fraction": sums.clipped / sums.tokens,
        "entropy": sums.entropy / sums.tokens,
        "grad_norm/policy": seen.norms.policy,
        "update/skipped": seen.skipped.policy,
    }
    if batch.mu is not None:
        gap = first.gap / first.tokens
        metrics |= {
            "ratio/mean": sums.ratio / sums.tokens,
            "ratio/max": sums.ratio_max,
            "rollout/logprob_gap_mean": gap,
            "rollout/logprob_gap_max": first.gap_max,
            # A gap that is no number is no small one.
            "rollout/logprob_alarm": (~(gap <= gap_alarm)).astype(jnp.int32),
        }
    if batch.reference is not None:
        metrics["kl/reference"] = sums.kl / sums.tokens
    if with_draft:
        metrics["loss/draft"] = sums.draft_loss / sums.draft_tokens
        metrics["draft/predicted_acceptance"] = first.overlap / first.draft_tokens
    if train_draft is not False:
        metrics["grad_norm/draft"] = jnp.where(train_draft, seen.norms.draft, jnp.nan)
        metrics["draft/skipped"] = seen.skipped.draft
    return metrics


def _total(x: Array, axis: int | None = None) -> Array:
    return jnp.sum(x, axis=axis, dtype=jnp.float32)

"""Metrics of a step. docs/metrics.md describes each name; scripts rely on them."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.train.batch import TrainBatch
from specjax.train.teacher import TeacherSums
from specjax.train.updates import Report
from specjax.types import Ending, Reward, Rollout

Metrics = dict[str, Array]

# The largest gap of a sequence may be so many times the mean gap of a token. 10 x 0.05: 1.6 times as likely.
SEQUENCE_GAP_FACTOR = 10


def rollout_metrics(rollout: Rollout) -> Metrics:
    """Return the metrics of a rollout. Statistics that it does not carry are left out; means of nothing are NaN."""
    tokens, lengths = _total(rollout.written), rollout.lengths
    metrics = {"rollout/tokens": tokens}
    if rollout.done is None:
        metrics["rollout/length_mean"] = tokens / len(lengths)
        metrics["rollout/length_max"] = jnp.max(rollout.written)
        if rollout.stopped is not None:
            metrics["rollout/truncated"] = _total(~rollout.stopped) / len(rollout.stopped)
            # Nothing, or nothing but a stop token.
            metrics["rollout/empty"] = jnp.sum((lengths <= 1) & rollout.stopped)
        if rollout.turns is not None and rollout.ending is not None:
            failed = (rollout.ending == Ending.FAILED) | (rollout.ending == Ending.TIMED_OUT)
            metrics |= {
                "rollout/turns": _total(rollout.turns) / len(lengths),
                "rollout/observed_tokens": _total(lengths) - tokens,
                "rollout/failed": _total(failed),
            }
    else:
        metrics |= _ended_metrics(rollout)
    if rollout.loop_rounds is not None:
        metrics["rollout/rounds"] = jnp.max(jnp.sum(rollout.loop_rounds, axis=-1))
    if rollout.loop_rounds is not None and rollout.draft_length is not None:
        drafted = _total(rollout.loop_rounds * rollout.draft_length)
        metrics["rollout/draft_length"] = drafted / _total(rollout.loop_rounds)
    if rollout.row_rounds is not None:
        # The first token of a row comes from its prefill, not from a verification.
        verified = tokens - _total(rollout.written > 0)
        metrics["rollout/acceptance_length"] = verified / _total(rollout.row_rounds)
    if rollout.accepted is not None and rollout.drafted is not None:
        rates = _total(rollout.accepted, axis=0) / _total(rollout.drafted, axis=0)
        metrics |= {f"rollout/acceptance_rate_pos_{i + 1}": rate for i, rate in enumerate(rates)}
    return metrics


def reward_metrics(
    reward: Reward,
    equal: Bool[Array, "N"],
    counted: Bool[Array, "K"],
    punishment: Float[Array, "R"],
    withheld: Int[Array, ""] | int = 0,
) -> Metrics:
    """Return statistics of the scored sequences; NaN if there are none.

    equal:      True for groups whose rewards are all equal.
    counted:    True for those of the selected sequences that train the policy.
    punishment: added to the reward of each sequence for its length.
    withheld:   number of groups whose rewards are withheld, so that all of them are NaN.
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
        "reward/failed": jnp.sum(~scored) - withheld * (len(scored) // len(equal)),
        "reward/overlong": jnp.sum(jnp.where(scored, punishment, 0.0)) / count,
        "groups/zero_variance": jnp.sum(equal) - withheld,
        "groups/sequences_trained": jnp.sum(counted),
    }


def update_metrics(
    report: Report,
    batch: TrainBatch,
    gap_alarm: float,
    by_sequence: bool,
    *,
    with_draft: bool,
    train_draft: bool | Bool[Array, ""],
) -> Metrics:
    """Return means over the tokens that each loss counts, and gradient norms before clipping, averaged over updates.

    The loss function's metrics are logged as `loss/NAME`. Metrics that no step measures are left out. Those of the
    draft are NaN in a step that neither trains nor measures it. Metrics that compare training with the rollout are
    those of the first update, whose policy generated the rollout.

    by_sequence: also raise the alarm by the largest gap of a sequence.
    """
    policy, draft = report.sums
    first = report.first_update
    metrics = {
        "loss/policy": jnp.where(policy.tokens > 0, policy.loss / report.updates, jnp.nan),
        "entropy": policy.entropy / policy.tokens,
        "grad_norm/policy": report.norms.policy,
        "update/skipped": report.skipped.policy,
        "update/empty": report.empty,
        "groups/sequences_with_advantage": jnp.sum(jnp.any(batch.trained & (batch.advantage != 0), axis=1)),
    }
    if batch.mu is not None:
        tokens, sequences = first.policy.compared
        gap, compared = first.policy.gap / tokens, tokens > 0
        sequence_gap = first.policy.sequence_gap_max
        # Written so that a NaN gap raises the alarm.
        sound = gap <= gap_alarm
        if by_sequence:
            sound &= sequence_gap <= SEQUENCE_GAP_FACTOR * gap_alarm
        metrics |= {
            "ratio/mean": policy.ratio / policy.tokens,
            "ratio/max": jnp.where(policy.tokens > 0, policy.ratio_max, jnp.nan),
            "rollout/logprob_gap_mean": gap,
            "rollout/logprob_gap_max": jnp.where(compared, first.policy.gap_max, jnp.nan),
            "rollout/sequence_logprob_gap_mean": first.policy.sequence_gap / sequences,
            "rollout/sequence_logprob_gap_max": jnp.where(compared, sequence_gap, jnp.nan),
            "rollout/logprob_alarm": (compared & ~sound).astype(jnp.int32),
        }
    if batch.reference is not None:
        metrics["kl/reference"] = policy.kl / policy.tokens
    if policy.teacher is not None:
        metrics |= _teacher_metrics(policy.teacher, policy.tokens)
    if policy.router is not None and first.policy.router is not None:
        none = jnp.where(policy.tokens > 0, 0.0, jnp.nan)
        metrics["router/balance_loss"] = policy.router.balance / report.updates + none
        metrics["router/load_max"] = jnp.max(policy.router.load) / report.updates + none
        metrics["router/unused"] = jnp.mean(policy.router.load == 0) + none
        if batch.routes is not None:
            metrics["router/rerouted"] = first.policy.router.rerouted / first.policy.router.compared
    if with_draft:
        metrics["loss/draft"] = draft.loss / draft.tokens
        metrics["draft/predicted_acceptance"] = first.draft.overlap / first.draft.tokens
    if train_draft is not False:
        metrics["grad_norm/draft"] = jnp.where(train_draft, report.norms.draft, jnp.nan)
        metrics["draft/skipped"] = report.skipped.draft
        metrics["draft/trained"] = jnp.asarray(train_draft, jnp.int32)
    return metrics | {f"loss/{name}": value / policy.tokens for name, value in policy.metrics.items()}


def _teacher_metrics(teacher: TeacherSums, tokens: Array) -> Metrics:
    return {
        "teacher/divergence": teacher.divergence / tokens,
        "teacher/reverse_kl": teacher.reverse / tokens,
        "teacher/forward_kl": teacher.forward / tokens,
        "teacher/overlap": teacher.overlap / teacher.overlaps,
        "teacher/entropy": teacher.entropy / tokens,
        "teacher/stop_gap": teacher.stop_gap / teacher.stops,
    }


def _ended_metrics(rollout: Rollout) -> Metrics:
    """Return lengths and ends of the sequences that ended in this rollout; those of others are not known yet."""
    assert rollout.done is not None and rollout.stopped is not None
    ended, lengths = rollout.done & (rollout.written > 0), rollout.lengths
    count = _total(ended)
    return {
        "rollout/length_mean": _total(jnp.where(ended, lengths, 0)) / count,
        "rollout/length_max": jnp.max(jnp.where(ended, lengths, 0)),
        "rollout/truncated": _total(ended & ~rollout.stopped) / count,
        "rollout/empty": jnp.sum(ended & (lengths <= 1) & rollout.stopped),
    }


def _total(x: Array, axis: int | None = None) -> Array:
    return jnp.sum(x, axis=axis, dtype=jnp.float32)

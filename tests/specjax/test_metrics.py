from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.train import metrics as train_metrics
from specjax.train.batch import TrainBatch
from specjax.train.draft.loss import DraftSums
from specjax.train.loss_sums import PolicySums, Sums
from specjax.train.metrics import update_metrics
from specjax.train.updates import Report
from specjax.types import Params, Reward, Rollout

ROWS, BUDGET, DRAFT_LENGTH = 12, 20, 3
reward_metrics, rollout_metrics = jax.jit(train_metrics.reward_metrics), jax.jit(train_metrics.rollout_metrics)


def rollout_from_rounds() -> tuple[Rollout, list[list[tuple[int, int]]]]:
    """Return a rollout built from its verifications: for each row, (accepted, emitted) tokens of every round."""
    rng = np.random.default_rng(0)
    rounds = []
    for row in range(ROWS):
        accepted = rng.integers(0, DRAFT_LENGTH + 1, rng.integers(0, 5) if row else 0)
        rounds.append([(int(m), int(m) + 1) for m in accepted])
    drafted, kept = (np.zeros((ROWS, DRAFT_LENGTH), np.int32) for _ in range(2))
    for row, verifications in enumerate(rounds):
        for m, _ in verifications:
            drafted[row] += 1
            kept[row, :m] += 1
    lengths = np.array([1 + sum(n for _, n in verifications) for verifications in rounds], np.int32)
    lengths[0] = 0
    return Rollout(
        tokens=np.zeros((ROWS, BUDGET), np.int32),
        lengths=lengths,
        stopped=np.arange(ROWS) % 3 == 0,
        drafted=drafted,
        accepted=kept,
        row_rounds=np.array([len(r) for r in rounds], np.int32),
        loop_rounds=np.array([[4, 0], [7, 2], [2, 0], [3, 1]], np.int32),
        draft_length=np.array([[3, 1]] * 4, np.int32),
    ), rounds


def test_rollout_metrics_equal_a_slow_reference() -> None:
    rollout, rounds = rollout_from_rounds()
    verifications = [v for row in rounds for v in row]
    expected = {
        "rollout/tokens": sum(map(int, rollout.lengths)),
        "rollout/length_mean": np.mean(rollout.lengths),
        "rollout/length_max": max(map(int, rollout.lengths)),
        "rollout/truncated": sum(not s for s in rollout.stopped) / ROWS,
        "rollout/empty": np.sum(rollout.stopped & (rollout.lengths <= 1)),
        "rollout/rounds": 9,
        "rollout/acceptance_length": np.mean([emitted for _, emitted in verifications]),
        "rollout/draft_length": (16 * 3 + 3 * 1) / 19,
    }
    for i in range(DRAFT_LENGTH):
        expected[f"rollout/acceptance_rate_pos_{i + 1}"] = np.mean([accepted > i for accepted, _ in verifications])
    metrics = rollout_metrics(rollout)
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-6, err_msg=name)
    required = rollout_metrics(Rollout(rollout.tokens, rollout.lengths))
    assert required.keys() == {"rollout/tokens", "rollout/length_mean", "rollout/length_max"}


@pytest.mark.parametrize(("drafts", "rounds", "length"), [(0, [0, 4], 1.0), (3, [0, 0], np.nan)])
def test_rollout_metrics_when_nothing_was_drafted(drafts: int, rounds: list[int], length: float) -> None:
    """Draft length 0, and a rollout without verifications."""
    counts, lengths = np.zeros((2, drafts), np.int32), np.array([1, 1 + rounds[1]])
    tokens = np.zeros((2, 5), np.int32)
    metrics = rollout_metrics(Rollout(tokens, lengths, drafted=counts, accepted=counts, row_rounds=np.array(rounds)))
    np.testing.assert_equal(float(metrics["rollout/acceptance_length"]), length)
    np.testing.assert_equal([float(x) for name, x in metrics.items() if "rate_pos" in name], [np.nan] * drafts)


def test_reward_metrics_equal_a_slow_reference() -> None:
    value = np.array([0.0, 2.0, np.nan, 5.0, 1.0, 1.0, 1.0, np.nan], np.float32)
    correct = np.array([0, 1, 1, 1, 0, 0, 0, 1], np.float32)
    scored = ~np.isnan(value)
    reward = Reward(jnp.array(value), jnp.array(correct))
    punishment = np.linspace(-0.7, 0, 8, dtype=np.float32)
    counted = scored & (np.arange(8) > 0)
    metrics = reward_metrics(reward, np.array([False, True]), counted, punishment)
    expected = {
        "reward/mean": value[scored].mean(),
        "reward/std": value[scored].std(),
        "reward/accuracy": correct[scored].mean(),
        "reward/failed": 2,
        "reward/overlong": punishment[scored].mean(),
        "groups/zero_variance": 1,
        "groups/sequences_trained": 5,
    }
    assert metrics.keys() == expected.keys()
    for name, wanted in expected.items():
        np.testing.assert_allclose(metrics[name], wanted, rtol=1e-6, err_msg=name)


def test_reward_metrics_when_every_sample_failed() -> None:
    value = np.full(4, np.nan, np.float32)
    metrics = reward_metrics(Reward(value, value), np.ones(2, bool), np.zeros(4, bool), np.zeros(4, np.float32))
    assert all(np.isnan(metrics.pop(f"reward/{name}")) for name in ("mean", "std", "accuracy", "overlong"))
    assert {name: float(x) for name, x in metrics.items()} == {
        "reward/failed": 4,
        "groups/zero_variance": 2,
        "groups/sequences_trained": 0,
    }


def some_sums(by: float) -> Sums:
    policy = PolicySums(*(jnp.float32(i + by) for i in range(11)), metrics={"mine": jnp.float32(by)})
    return Sums(policy, DraftSums(*(jnp.float32(i + 3 * by) for i in range(7))))


SUMS, FIRST = some_sums(2), some_sums(40)
NORMS, SKIPPED = Params(jnp.float32(5.0), jnp.float32(13.0)), Params(jnp.int32(2), jnp.int32(1))
REPORT = Report(4, SUMS, FIRST, norms=NORMS, skipped=SKIPPED, empty=jnp.int32(3))
COLUMNS, ROW = jnp.zeros((1, 3)), jnp.ones((1, 3), bool)
SCORES = dict(reward=COLUMNS[:, 0], counted=ROW[:, 0])
RECORDED = TrainBatch(jnp.zeros((1, 3), jnp.int32), ROW, **SCORES, mu=COLUMNS, advantage=COLUMNS, reference=COLUMNS)


def test_update_metrics_divide_by_the_tokens_each_loss_counts() -> None:
    policy, draft, first = SUMS.policy, SUMS.draft, FIRST
    expected = {
        "loss/policy": policy.loss / 4,
        "loss/mine": policy.metrics["mine"] / policy.tokens,
        "kl/reference": policy.kl / policy.tokens,
        "entropy": policy.entropy / policy.tokens,
        "ratio/mean": policy.ratio / policy.tokens,
        "ratio/max": policy.ratio_max,
        "rollout/logprob_gap_mean": first.policy.gap / first.policy.tokens,
        "rollout/logprob_gap_max": first.policy.gap_max,
        "rollout/sequence_logprob_gap_mean": first.policy.sequence_gap / first.policy.sequences,
        "rollout/sequence_logprob_gap_max": first.policy.sequence_gap_max,
        "rollout/logprob_alarm": 1,
        "loss/draft": draft.loss / draft.tokens,
        "draft/predicted_acceptance": first.draft.overlap / first.draft.tokens,
        "grad_norm/policy": 5.0,
        "grad_norm/draft": 13.0,
        "update/skipped": 2,
        "update/empty": 3,
        "draft/skipped": 1,
        "draft/trained": 1,
        "groups/sequences_with_advantage": 0,
    }
    metrics = update_metrics(REPORT, RECORDED, 1.1, True, with_draft=True, train_draft=True)
    assert metrics.keys() == expected.keys()
    for name, wanted in expected.items():
        np.testing.assert_allclose(metrics[name], wanted, rtol=1e-6, err_msg=name)
    assert update_metrics(REPORT, RECORDED, 1.3, False, with_draft=True, train_draft=True)["rollout/logprob_alarm"] == 0


@pytest.mark.parametrize("gap", [jnp.nan, jnp.inf])
@pytest.mark.parametrize("name", ["gap", "sequence_gap_max"])
def test_a_gap_that_is_not_finite_raises_the_alarm(name: str, gap: float) -> None:
    first = FIRST._replace(policy=FIRST.policy._replace(**{name: jnp.float32(gap)}))
    report = REPORT._replace(first_update=first)
    assert update_metrics(report, RECORDED, 1.0, True, with_draft=True, train_draft=True)["rollout/logprob_alarm"] == 1


@pytest.mark.parametrize(
    ("absent", "names"),
    [
        ("with_draft", {"loss/draft", "draft/predicted_acceptance"}),
        ("train_draft", {"grad_norm/draft", "draft/skipped", "draft/trained"}),
        ("reference", {"kl/reference"}),
        (
            "mu",
            {"ratio/mean", "ratio/max", "rollout/sequence_logprob_gap_mean", "rollout/sequence_logprob_gap_max"}
            | {f"rollout/logprob_{name}" for name in ("gap_mean", "gap_max", "alarm")},
        ),
    ],
)
def test_missing_measurements_are_left_out(absent: str, names: set[str]) -> None:
    options = dict(with_draft=True, train_draft=True)
    batch = replace(RECORDED, **({} if absent in options else {absent: None}))
    fewer = options | ({absent: False} if absent in options else {})
    everything = update_metrics(REPORT, RECORDED, 1.0, True, **options)
    assert everything.keys() - update_metrics(REPORT, batch, 1.0, True, **fewer).keys() == names

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.train.batch import Batch
from specjax.train.gradients import Sums
from specjax.train.metrics import reward_metrics, rollout_metrics, update_metrics
from specjax.train.updates import Report
from specjax.types import Params, Reward, Rollout

ROWS, BUDGET, DRAFT_LENGTH, SHARDS = 12, 20, 3, 4


def spoken_rollout() -> tuple[Rollout, list[list[tuple[int, int]]]]:
    """A rollout as its verifications went: for each row, (drafts accepted, tokens emitted) of every round."""
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
        tokens=jnp.zeros((ROWS, BUDGET), jnp.int32),
        lengths=jnp.array(lengths),
        stopped=jnp.arange(ROWS) % 3 == 0,
        drafted=jnp.array(drafted),
        accepted=jnp.array(kept),
        row_rounds=jnp.array([len(r) for r in rounds], jnp.int32),
        loop_rounds=jnp.array([[4, 0], [7, 2], [2, 0], [3, 1]], jnp.int32),
        draft_length=jnp.array([[3, 1]] * 4, jnp.int32),
    ), rounds


def test_rollout_metrics_read_slowly() -> None:
    rollout, rounds = spoken_rollout()
    verifications = [v for row in rounds for v in row]
    expected = {
        "rollout/tokens": sum(map(int, rollout.lengths)),
        "rollout/length_mean": np.mean(rollout.lengths),
        "rollout/length_max": max(map(int, rollout.lengths)),
        "rollout/truncated": sum(not s for s in rollout.stopped) / ROWS,
        "rollout/empty": np.sum(np.asarray(rollout.stopped) & (np.asarray(rollout.lengths) <= 1)),
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


def test_rollout_metrics_of_tokens_and_lengths_alone() -> None:
    rollout, _ = spoken_rollout()
    metrics = rollout_metrics(Rollout(rollout.tokens, rollout.lengths))
    assert metrics.keys() == {"rollout/tokens", "rollout/length_mean", "rollout/length_max"}


def test_rollout_metrics_without_drafting() -> None:
    none = jnp.zeros((2, 0), jnp.int32)
    rollout = Rollout(
        tokens=jnp.zeros((2, 5), jnp.int32),
        lengths=jnp.array([1, 5]),
        drafted=none,
        accepted=none,
        row_rounds=jnp.array([0, 4]),
    )
    metrics = rollout_metrics(rollout)
    assert metrics["rollout/acceptance_length"] == 1
    assert not any("rate_pos" in name for name in metrics)


def test_rollout_metrics_when_nothing_was_verified() -> None:
    zeros = jnp.zeros((2, 3), jnp.int32)
    rollout = Rollout(zeros, jnp.ones(2, jnp.int32), drafted=zeros, accepted=zeros, row_rounds=jnp.zeros(2, jnp.int32))
    metrics = rollout_metrics(rollout)
    assert metrics["rollout/acceptance_length"] == 0 and metrics["rollout/acceptance_rate_pos_1"] == 0


def test_reward_metrics_read_slowly() -> None:
    value = np.array([0.0, 2.0, np.nan, 5.0, 1.0, 1.0, 1.0, np.nan], np.float32)
    correct = np.array([0, 1, 1, 1, 0, 0, 0, 1], np.float32)
    scored = ~np.isnan(value)
    reward = Reward(jnp.array(value), jnp.array(correct))
    punishment = np.linspace(-0.7, 0, 8, dtype=np.float32)
    counted = jnp.array(scored).at[0].set(False)
    metrics = reward_metrics(reward, jnp.array([False, True]), counted, jnp.array(punishment))
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
    value = jnp.full(4, jnp.nan)
    metrics = reward_metrics(Reward(value, value), jnp.ones(2, bool), jnp.zeros(4, bool), jnp.zeros(4))
    assert all(jnp.isnan(metrics.pop(f"reward/{name}")) for name in ("mean", "std", "accuracy", "overlong"))
    assert {name: float(x) for name, x in metrics.items()} == {
        "reward/failed": 4,
        "groups/zero_variance": 2,
        "groups/sequences_trained": 0,
    }


def some_sums(by: int) -> Sums:
    return Sums(**{name: jnp.float32(i + by) for i, name in enumerate(Sums._fields)})


SUMS, FIRST = some_sums(2), some_sums(40)
NORMS, SKIPPED = Params(jnp.float32(5.0), jnp.float32(13.0)), Params(jnp.int32(2), jnp.int32(1))
SEEN = Report(4, SUMS, FIRST, norms=NORMS, skipped=SKIPPED)
COLUMNS = jnp.zeros((1, 3))
RECORDED = Batch(jnp.zeros((1, 3), jnp.int32), jnp.ones((1, 3), bool), mu=COLUMNS, reference=COLUMNS)


def test_update_metrics_divide_by_the_tokens_each_loss_counts() -> None:
    expected = {
        "loss/policy": SUMS.policy_loss / 4,
        "loss/clip_fraction": SUMS.clipped / SUMS.tokens,
        "kl/reference": SUMS.kl / SUMS.tokens,
        "entropy": SUMS.entropy / SUMS.tokens,
        "ratio/mean": SUMS.ratio / SUMS.tokens,
        "ratio/max": SUMS.ratio_max,
        "rollout/logprob_gap_mean": FIRST.gap / FIRST.tokens,
        "rollout/logprob_gap_max": FIRST.gap_max,
        "rollout/logprob_alarm": 1,
        "loss/draft": SUMS.draft_loss / SUMS.draft_tokens,
        "draft/predicted_acceptance": FIRST.overlap / FIRST.draft_tokens,
        "grad_norm/policy": 5.0,
        "grad_norm/draft": 13.0,
        "update/skipped": 2,
        "draft/skipped": 1,
    }
    metrics = update_metrics(SEEN, RECORDED, 1.1, with_draft=True, train_draft=True)
    assert metrics.keys() == expected.keys()
    for name, wanted in expected.items():
        np.testing.assert_allclose(metrics[name], wanted, rtol=1e-6, err_msg=name)
    assert update_metrics(SEEN, RECORDED, 1.3, with_draft=True, train_draft=True)["rollout/logprob_alarm"] == 0


@pytest.mark.parametrize("gap", [jnp.nan, jnp.inf])
def test_a_gap_that_is_not_finite_raises_the_alarm(gap: float) -> None:
    seen = SEEN._replace(first=FIRST._replace(gap=jnp.float32(gap)))
    assert update_metrics(seen, RECORDED, 1.0, with_draft=True, train_draft=True)["rollout/logprob_alarm"] == 1


@pytest.mark.parametrize(
    ("absent", "names"),
    [
        ("with_draft", {"loss/draft", "draft/predicted_acceptance"}),
        ("train_draft", {"grad_norm/draft", "draft/skipped"}),
        ("reference", {"kl/reference"}),
        (
            "mu",
            {
                *("ratio/mean", "ratio/max", "rollout/logprob_gap_mean", "rollout/logprob_gap_max"),
                "rollout/logprob_alarm",
            },
        ),
    ],
)
def test_what_was_not_measured_is_left_out(absent: str, names: set[str]) -> None:
    options = dict(with_draft=True, train_draft=True)
    batch = replace(RECORDED, **({} if absent in options else {absent: None}))
    fewer = options | ({absent: False} if absent in options else {})
    everything = update_metrics(SEEN, RECORDED, 1.0, **options)
    assert everything.keys() - update_metrics(SEEN, batch, 1.0, **fewer).keys() == names

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.advantage import group_advantages
from specjax.gradients import Sums
from specjax.metrics import loss_metrics, reward_metrics, rollout_metrics
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
        rounds=jnp.array([len(r) for r in rounds], jnp.int32),
        trips=jnp.array([[4, 0], [7, 2], [2, 0], [3, 1]], jnp.int32),
        k=jnp.array([[3, 1]] * 4, jnp.int32),
    ), rounds


def test_rollout_metrics_read_slowly() -> None:
    rollout, rounds = spoken_rollout()
    verifications = [v for row in rounds for v in row]
    expected = {
        "rollout/tokens": sum(map(int, rollout.lengths)),
        "rollout/length_mean": np.mean(rollout.lengths),
        "rollout/length_max": max(map(int, rollout.lengths)),
        "rollout/truncated": sum(not s for s in rollout.stopped) / ROWS,
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
        rounds=jnp.array([0, 4]),
    )
    metrics = rollout_metrics(rollout)
    assert metrics["rollout/acceptance_length"] == 1
    assert not any("rate_pos" in name for name in metrics)


def test_rollout_metrics_when_nothing_was_verified() -> None:
    zeros = jnp.zeros((2, 3), jnp.int32)
    rollout = Rollout(zeros, jnp.ones(2, jnp.int32), drafted=zeros, accepted=zeros, rounds=jnp.zeros(2, jnp.int32))
    metrics = rollout_metrics(rollout)
    assert metrics["rollout/acceptance_length"] == 0 and metrics["rollout/acceptance_rate_pos_1"] == 0


def test_reward_metrics_read_slowly() -> None:
    value = np.array([0.0, 2.0, np.nan, 5.0, 1.0, 1.0, 1.0, np.nan], np.float32)
    correct = np.array([0, 1, 1, 1, 0, 0, 0, 1], np.float32)
    scored = ~np.isnan(value)
    metrics = reward_metrics(Reward(jnp.array(value), jnp.array(correct)), group_advantages(jnp.array(value), 4))
    expected = {
        "reward/mean": value[scored].mean(),
        "reward/std": value[scored].std(),
        "reward/accuracy": correct[scored].mean(),
        "reward/failed": 2,
        "groups/zero_variance": 1,
    }
    assert metrics.keys() == expected.keys()
    for name, wanted in expected.items():
        np.testing.assert_allclose(metrics[name], wanted, rtol=1e-6, err_msg=name)


def test_reward_metrics_when_every_sample_failed() -> None:
    value = jnp.full(4, jnp.nan)
    metrics = reward_metrics(Reward(value, value), group_advantages(value, 2))
    assert {name: float(x) for name, x in metrics.items()} == {
        "reward/mean": 0,
        "reward/std": 0,
        "reward/accuracy": 0,
        "reward/failed": 4,
        "groups/zero_variance": 2,
    }


def some_sums() -> Sums:
    return Sums(**{name: jnp.float32(i + 2) for i, name in enumerate(Sums._fields)})


def test_loss_metrics_divide_by_the_tokens_each_loss_counts() -> None:
    sums = some_sums()
    gradients = Params(policy={"a": jnp.array([3.0, 0.0]), "b": jnp.array(4.0)}, draft={"c": jnp.array([5.0, 12.0])})
    expected = {
        "loss/policy": sums.policy_loss,
        "loss/clip_fraction": sums.clipped / sums.tokens,
        "kl/reference": sums.kl / sums.tokens,
        "entropy": sums.entropy / sums.tokens,
        "ratio/mean": sums.ratio / sums.tokens,
        "ratio/max": sums.ratio_max,
        "rollout/logprob_gap_mean": sums.gap / sums.tokens,
        "rollout/logprob_gap_max": sums.gap_max,
        "loss/draft": sums.draft_loss / sums.draft_tokens,
        "draft/predicted_acceptance": sums.overlap / sums.draft_tokens,
        "grad_norm/policy": 5.0,
        "grad_norm/draft": 13.0,
    }
    metrics = loss_metrics(sums, gradients, with_draft=True, train_draft=True, with_reference=True, with_mu=True)
    assert metrics.keys() == expected.keys()
    for name, wanted in expected.items():
        np.testing.assert_allclose(metrics[name], wanted, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("absent", "names"),
    [
        ("with_draft", {"loss/draft", "draft/predicted_acceptance"}),
        ("train_draft", {"grad_norm/draft"}),
        ("with_reference", {"kl/reference"}),
        ("with_mu", {"ratio/mean", "ratio/max", "rollout/logprob_gap_mean", "rollout/logprob_gap_max"}),
    ],
)
def test_what_was_not_measured_is_left_out(absent: str, names: set[str]) -> None:
    gradients = Params({"a": jnp.ones(2)}, {"c": jnp.ones(2)})
    present = dict(with_draft=True, train_draft=True, with_reference=True, with_mu=True)
    everything = loss_metrics(some_sums(), gradients, **present)
    assert everything.keys() - loss_metrics(some_sums(), gradients, **present | {absent: False}).keys() == names

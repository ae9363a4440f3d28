import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.advantage import group_advantages


def reference(reward: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    """Group by group in float64, failed samples taken out before anything is computed."""
    value = np.zeros(reward.shape)
    for row, group in enumerate(reward.astype(np.float64)):
        scored = group[~np.isnan(group)]
        if len(scored) and scored.std() > 0:
            value[row] = np.where(np.isnan(group), 0.0, (group - scored.mean()) / (scored.std() + eps))
    return value


def test_matches_the_reference_with_failed_samples() -> None:
    reward = np.random.default_rng(0).normal(3.0, 2.0, (50, 8)).astype(np.float32)
    reward[np.random.default_rng(1).random(reward.shape) < 0.3] = np.nan
    got = group_advantages(jnp.array(reward.ravel()), 8)
    np.testing.assert_allclose(got.value, reference(reward).ravel(), atol=1e-5)
    np.testing.assert_array_equal(got.scored, ~np.isnan(reward.ravel()))
    assert not got.zero_variance.any()


@pytest.mark.parametrize("failed", [jnp.nan, jnp.inf, -jnp.inf])
def test_a_failed_sample_leaves_the_statistics_of_its_group(failed: float) -> None:
    with_failed = group_advantages(jnp.array([1.0, failed, 0.0, 0.0, failed, 1.0]), 6).value
    without = group_advantages(jnp.array([1.0, 0.0, 0.0, 1.0]), 4).value
    np.testing.assert_allclose(with_failed, [without[0], 0, without[1], without[2], 0, without[3]], rtol=1e-6)


@pytest.mark.parametrize("reward", [0.0, 0.1, 10.1, -3.3e4])
def test_a_group_of_equal_rewards_teaches_nothing(reward: float) -> None:
    got = group_advantages(jnp.full(7, reward, jnp.float32), 7)
    np.testing.assert_array_equal(got.value, np.zeros(7))
    assert got.zero_variance.all() and got.scored.all()


def test_small_differences_in_reward_still_teach() -> None:
    got = group_advantages(jnp.array([1.0, 1.0, 1.0, 1.001]), 4)
    np.testing.assert_allclose(got.value, reference(np.array([[1.0, 1.0, 1.0, 1.001]])).ravel(), rtol=0.01)
    assert not got.zero_variance.any()


@pytest.mark.parametrize("group", [[np.nan, np.nan, np.nan], [np.nan, 2.0, np.nan]])
def test_groups_with_fewer_than_two_scores_teach_nothing(group: list[float]) -> None:
    got = group_advantages(jnp.array(group, jnp.float32), 3)
    np.testing.assert_array_equal(got.value, np.zeros(3))
    np.testing.assert_array_equal(got.zero_variance, [True])


def test_groups_are_consecutive_and_independent() -> None:
    reward = jnp.array([0.0, 1.0, 5.0, 5.0, 2.0, 8.0])
    got = group_advantages(reward, 2)
    np.testing.assert_allclose(got.value, [-1, 1, 0, 0, -1, 1], atol=1e-5)
    np.testing.assert_array_equal(got.zero_variance, [False, True, False])
    alone = group_advantages(reward[4:], 2)
    np.testing.assert_array_equal(got.value[4:], alone.value)


def test_traces_under_jit() -> None:
    reward = jnp.array([0.0, jnp.nan, 1.0, 3.0])
    jitted = jax.jit(group_advantages, static_argnums=1)(reward, 4)
    np.testing.assert_allclose(jitted.value, group_advantages(reward, 4).value, rtol=1e-6)

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.train import advantage
from specjax.train.advantage import AdvantageConfig

group_advantages = jax.jit(advantage.group_advantages, static_argnums=(1, 2))
zero_variance = jax.jit(advantage.zero_variance, static_argnums=1)
token_advantages = jax.jit(advantage.token_advantages)

NAMED = {
    "GRPO": AdvantageConfig(),
    "Dr. GRPO": AdvantageConfig(scale="none"),
    "RLOO": AdvantageConfig(baseline="others", scale="none"),
    "REINFORCE++": AdvantageConfig(baseline="batch", scale="batch"),
    "REINFORCE++ with a baseline": AdvantageConfig(scale="batch"),
}


ALLOWED = [
    AdvantageConfig(baseline, scale)
    for baseline in ("group", "others", "batch")
    for scale in ("group", "batch", "none")
    if (baseline, scale) != ("batch", "group")
]


def as_the_papers_have_it(name: str, groups: list[np.ndarray]) -> np.ndarray:
    """Return the advantages by the papers' formulas, for groups without failed samples, in float64."""
    everything = np.concatenate(groups)
    match name:
        case "GRPO":
            each = [(group - group.mean()) / group.std() for group in groups]
        case "Dr. GRPO":
            each = [group - group.mean() for group in groups]
        case "RLOO":
            each = [[r - np.delete(group, i).mean() for i, r in enumerate(group)] for group in groups]
        case "REINFORCE++":
            each = [(group - everything.mean()) / everything.std() for group in groups]
        case _:
            centred = [group - group.mean() for group in groups]
            each = [group / np.concatenate(centred).std() for group in centred]
    return np.concatenate([np.asarray(group) for group in each])


@pytest.mark.parametrize("name", NAMED)
def test_every_advantage_matches_its_paper(name: str) -> None:
    """Failed samples leave groups of 4 to 7 samples. They are not part of any statistic."""
    rng = np.random.default_rng(2)
    reward = rng.normal(1.0, 2.0, (6, 8)).astype(np.float32)
    failed = np.arange(8)[None] < rng.integers(1, 5, (6, 1))
    given = jnp.array(np.where(failed, rng.choice([np.nan, np.inf, -np.inf], (6, 8)), reward).ravel())
    got = group_advantages(given, 8, NAMED[name])
    groups = [row[~out].astype(np.float64) for row, out in zip(reward, failed, strict=True)]
    np.testing.assert_allclose(got[~failed.ravel()], as_the_papers_have_it(name, groups), atol=1e-5)
    assert not np.asarray(got)[failed.ravel()].any()
    assert not zero_variance(given, 8).any()


@pytest.mark.parametrize("config", ALLOWED, ids=str)
def test_equal_rewards_give_no_advantage_by_any_rule(config: AdvantageConfig) -> None:
    for reward in (0.0, 0.1, 10.1, -3.3e4):
        equal = jnp.full(6, reward, jnp.float32)
        np.testing.assert_array_equal(group_advantages(equal, 3, config), np.zeros(6))
        assert zero_variance(equal, 3).all()


@pytest.mark.parametrize("config", ALLOWED, ids=str)
@pytest.mark.parametrize("offset", [1000.1, -1e6, 1e38])
def test_row_73_rounding_of_the_rewards_gives_no_advantage(offset: float, config: AdvantageConfig) -> None:
    """Differences of some units of the last place are no spread; larger ones count, at any offset."""
    reward = np.full(8, offset, np.float32)
    for ulps in range(1, 4):
        reward[3] = np.nextafter(reward[3], np.float32(np.inf))
        np.testing.assert_array_equal(group_advantages(jnp.array(reward), 4, config), np.zeros(8))
        assert zero_variance(jnp.array(reward), 4).all(), ulps
    reward[3:6] *= np.float32(1.0001)
    assert not zero_variance(jnp.array(reward), 4).any()
    name = next((name for name, known in NAMED.items() if known == config), None)
    if name is not None:
        got = group_advantages(jnp.array(reward), 4, config)
        expected = as_the_papers_have_it(name, list(reward.astype(np.float64).reshape(2, 4)))
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("config", ALLOWED, ids=str)
def test_a_group_of_equal_rewards_has_a_small_advantage_or_none(config: AdvantageConfig) -> None:
    """The group differs from the batch's mean, but not from its own."""
    got = np.asarray(group_advantages(jnp.array([1.0, 1.0, 1.0, 0.0, 1.0, 0.0]), 3, config))
    assert np.abs(got).max() < 2
    assert (got[:3] > 0).all() if config.baseline == "batch" else not got[:3].any()


@pytest.mark.parametrize(
    "reward, group, expected, equal",
    [
        # Groups are consecutive and independent.
        ([0.0, 1.0, 5.0, 5.0, 2.0, 8.0], 2, [-1, 1, 0, 0, -1, 1], [False, True, False]),
        # Fewer than two scores give no advantage, small differences do.
        ([np.nan, np.nan, np.nan, np.nan, 2.0, np.nan], 3, [0] * 6, [True, True]),
        ([1.0, 1.0, 1.0, 1.001], 4, [-(3**-0.5)] * 3 + [3**0.5], [False]),
        # Reciprocals of large deviations are subnormal, and differences from the mean overflow.
        ([1.6e38, -1.6e38, 0.0, 0.0], 4, [2**0.5, -(2**0.5), 0, 0], [False]),
        (
            [3.4e38, -3.4e38, -3.4e38, -3.4e38, 1e38, 1e38, 1e38, 1e38],
            4,
            [3**0.5] + [-(3**-0.5)] * 3 + [0] * 4,
            [False, True],
        ),
    ],
)
def test_advantages_of_groups(reward: list[float], group: int, expected: list[float], equal: list[bool]) -> None:
    given = jnp.array(reward, jnp.float32)
    np.testing.assert_allclose(group_advantages(given, group), expected, rtol=0.01, atol=1e-5)
    np.testing.assert_array_equal(zero_variance(given, group), equal)
    assert np.isfinite(token_advantages(given, jnp.zeros((len(reward), 2)), jnp.ones((len(reward), 2), bool))).all()


def test_tokens_have_the_returns_of_later_tokens() -> None:
    """Compare with REINFORCE++ in float64. Samples without a score and tokens outside completions do not count.

    Equal returns give no advantage.
    """
    every = jnp.ones((3, 4), bool)
    nearly = jnp.array([1000.1, 1000.1, np.nextafter(np.float32(1000.1), np.float32(2000))], jnp.float32)
    for equal in (jnp.full(3, 10.1), nearly):
        assert not token_advantages(equal, jnp.zeros((3, 4)), every).any()
    rng = np.random.default_rng(3)
    reward, cost = rng.normal(size=5), rng.normal(0.0, 0.3, (5, 9))
    reward[[1, 3]] = np.nan, np.inf
    completion = (np.arange(9) >= 2) & (np.arange(9) < np.array([[9], [7], [5], [8], [3]]))
    returns = {
        (i, t): reward[i] - sum(cost[i, u] for u in range(t, 9) if completion[i, u])
        for i, t in zip(*np.nonzero(completion), strict=True)
        if np.isfinite(reward[i])
    }
    each = np.array(list(returns.values()))
    expected = np.zeros((5, 9))
    for at, value in returns.items():
        expected[at] = (value - each.mean()) / each.std()
    got = token_advantages(jnp.array(reward, jnp.float32), jnp.array(cost, jnp.float32), jnp.array(completion))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)

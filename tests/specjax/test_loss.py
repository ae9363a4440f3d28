import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.loss import LossConfig, grpo_terms, k3

ROWS, TOKENS = 6, 9


class Case:
    """Random log-probs on both sides of every clip, in float64, and what the loss makes of them."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        shape = (ROWS, TOKENS)
        self.old = -rng.exponential(2.0, shape)
        self.theta = np.minimum(self.old + rng.normal(0, 0.4, shape), 0.0)
        self.mu = np.minimum(self.old + rng.normal(0, 0.8, shape), 0.0)
        self.reference = np.minimum(self.old + rng.normal(0, 0.5, shape), 0.0)
        self.advantage = rng.normal(0, 1, ROWS)
        self.mask = rng.random(shape) < 0.7

    def terms(self, config: LossConfig, theta: np.ndarray | None = None, with_reference: bool = True):
        arrays = (self.theta if theta is None else theta, self.old, self.mu)
        theta_, old, mu = (jnp.array(x, jnp.float32) for x in arrays)
        reference = jnp.array(self.reference, jnp.float32) if with_reference else None
        return grpo_terms(
            theta_, old, mu, reference, jnp.array(self.advantage, jnp.float32), jnp.array(self.mask), config
        )

    def expected(self, config: LossConfig, theta: np.ndarray | None = None) -> np.ndarray:
        """Token by token, case by case, as the papers state it."""
        theta = self.theta if theta is None else theta
        loss = np.zeros((ROWS, TOKENS))
        for i, j in zip(*np.nonzero(self.mask), strict=True):
            ratio, advantage = np.exp(theta[i, j] - self.old[i, j]), self.advantage[i]
            if advantage > 0:
                objective = min(ratio, 1 + config.clip_high) * advantage
            else:
                objective = max(ratio, 1 - config.clip_low) * advantage
            if config.importance_cap is not None:
                objective *= min(np.exp(self.old[i, j] - self.mu[i, j]), config.importance_cap)
            gap = self.reference[i, j] - theta[i, j]
            loss[i, j] = config.kl_coefficient * (np.exp(gap) - gap - 1) - objective
        return loss


CONFIGS = [
    LossConfig(),
    LossConfig(clip_low=0.1, clip_high=0.5, importance_cap=None),
    LossConfig(clip_low=0.3, clip_high=0.05, importance_cap=0.9, kl_coefficient=0.2),
    LossConfig(kl_coefficient=1.5),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_the_loss_matches_a_float64_reference(config: LossConfig) -> None:
    case = Case()
    np.testing.assert_allclose(case.terms(config).loss, case.expected(config), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", CONFIGS)
def test_the_gradient_matches_finite_differences(config: LossConfig) -> None:
    case, step = Case(), 1e-6
    theta = jnp.array(case.theta, jnp.float32)

    def total(theta: jax.Array) -> jax.Array:
        f32 = [jnp.array(x, jnp.float32) for x in (case.old, case.mu, case.reference, case.advantage)]
        return jnp.sum(grpo_terms(theta, *f32, jnp.array(case.mask), config).loss)

    # Each token's term depends on its own theta alone, so that one shift of all of them gives every derivative.
    rise = case.expected(config, case.theta + step) - case.expected(config, case.theta - step)
    np.testing.assert_allclose(jax.grad(total)(theta), rise / (2 * step), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "slope"),
    [
        (1.1, 2.0, 2.2, 2.2),
        (1.5, 2.0, 2.56, 0.0),
        (0.5, 2.0, 1.0, 1.0),
        (0.9, -2.0, -1.8, -1.8),
        (0.5, -2.0, -1.6, 0.0),
        (1.5, -2.0, -3.0, -3.0),
    ],
)
def test_the_clip_stops_the_gradient_only_where_it_would_push_further(
    ratio: float, advantage: float, objective: float, slope: float
) -> None:
    config = LossConfig(clip_low=0.2, clip_high=0.28, importance_cap=None)
    zero, mask = jnp.zeros((1, 1)), jnp.ones((1, 1), bool)

    def term(theta: jax.Array):
        return grpo_terms(theta, zero, zero, None, jnp.full(1, advantage), mask, config)

    theta = jnp.full((1, 1), jnp.log(ratio), jnp.float32)
    np.testing.assert_allclose(term(theta).loss, [[-objective]], rtol=1e-5)
    np.testing.assert_allclose(jax.grad(lambda t: term(t).loss[0, 0])(theta), [[-slope]], rtol=1e-5)
    np.testing.assert_array_equal(term(theta).clipped, [[float(slope == 0)]])


@pytest.mark.parametrize(
    ("cap", "gap", "weight"), [(2.0, 0.5, np.exp(0.5)), (2.0, 3.0, 2.0), (2.0, -3.0, np.exp(-3.0)), (None, 3.0, 1.0)]
)
def test_the_importance_weight_is_truncated_from_above_and_carries_no_gradient(
    cap: float | None, gap: float, weight: float
) -> None:
    config, mask, mu = LossConfig(importance_cap=cap), jnp.ones((1, 1), bool), jnp.full((1, 1), -4.0)

    def loss(theta: jax.Array) -> jax.Array:
        return grpo_terms(theta, theta, mu, None, jnp.ones(1), mask, config).loss[0, 0]

    theta = mu + gap
    np.testing.assert_allclose(loss(theta), -weight, rtol=1e-5)
    # With `old` moving along with theta the ratio stays 1: whatever slope is left would be the weight's own.
    np.testing.assert_array_equal(jax.grad(loss)(theta), [[0.0]])


def test_what_lies_outside_the_mask_cannot_matter() -> None:
    case = Case()
    clean = case.terms(LossConfig(kl_coefficient=1.0))
    for name in ("theta", "old", "mu", "reference"):
        setattr(case, name, np.where(case.mask, getattr(case, name), -np.inf))
    dirty = case.terms(LossConfig(kl_coefficient=1.0))
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)
    assert all(not np.asarray(x)[~case.mask].any() for x in dirty)

    def total(theta: jax.Array) -> jax.Array:
        return jnp.sum(case.terms(LossConfig(kl_coefficient=1.0), theta).loss)

    gradient = jax.grad(total)(jnp.array(case.theta, jnp.float32))
    assert np.isfinite(gradient).all() and not np.asarray(gradient)[~case.mask].any()


def test_k3_is_zero_at_the_reference_positive_elsewhere_and_unbiased() -> None:
    log_p = jax.nn.log_softmax(jnp.array([0.3, -1.0, 2.0, 0.1]))
    log_r = jax.nn.log_softmax(jnp.array([1.0, 0.0, 1.5, -0.4]))
    estimate = k3(log_p, log_r)
    np.testing.assert_array_equal(k3(log_p, log_p), np.zeros(4))
    assert (estimate > 0).all()
    np.testing.assert_allclose(jnp.sum(jnp.exp(log_p) * estimate), jnp.sum(jnp.exp(log_p) * (log_p - log_r)), rtol=1e-5)


def test_without_a_reference_there_is_no_kl() -> None:
    terms = Case().terms(LossConfig(kl_coefficient=1.0), with_reference=False)
    assert not terms.kl.any()


@pytest.mark.parametrize(
    "options", [dict(clip_low=-0.1), dict(clip_high=-1.0), dict(kl_coefficient=-1.0), dict(importance_cap=0.0)]
)
def test_options_out_of_range_are_refused_by_name(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        LossConfig(**options)

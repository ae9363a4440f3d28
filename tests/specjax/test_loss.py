from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.train.loss import LossConfig, LossInputs, LossOutput, kl_cost, per_token_loss, policy_loss, token_weights
from tests.refusals import refuses

ROWS, TOKENS = 6, 9


class Case:
    """Random float64 log-probs on both sides of every clip, and the loss of them."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        shape = (ROWS, TOKENS)
        self.old = -rng.exponential(2.0, shape)
        self.theta = np.minimum(self.old + rng.normal(0, 0.4, shape), 0.0)
        self.mu = np.minimum(self.old + rng.normal(0, 0.8, shape), 0.0)
        self.reference = np.minimum(self.old + rng.normal(0, 0.5, shape), 0.0)
        # Each token has its own.
        self.advantage = rng.normal(0, 1, shape)
        self.mask = rng.random(shape) < 0.7

    def inputs(self, theta: jax.Array | None = None) -> LossInputs:
        """Return the inputs of `loss_fn`, which are 0 outside the mask, with `theta` in place of the case's."""
        given = (self.theta if theta is None else theta, self.old, self.mu, self.reference, self.advantage)
        mask = jnp.array(self.mask)
        return LossInputs(*(jnp.where(mask, jnp.asarray(x, jnp.float32), 0.0) for x in given), mask)

    def loss(self, config: LossConfig, theta: jax.Array | None = None) -> jax.Array:
        return per_token_loss(policy_loss, self.inputs(theta), config).loss

    def expected(self, config: LossConfig, theta: np.ndarray | None = None) -> np.ndarray:
        """Return the loss by the papers' formulas, token by token."""
        theta = self.theta if theta is None else theta
        loss = np.zeros((ROWS, TOKENS))
        for i, j in zip(*np.nonzero(self.mask), strict=True):
            counts, advantage = self.mask[i], self.advantage[i, j]
            of_sequence = config.ratio == "sequence"
            # With CISPO the ratio is a constant, so it does not change with theta.
            gap = (self.theta if config.surrogate == "cispo" else theta) - self.old
            ratio = np.exp(np.mean(gap[i, counts]) if of_sequence else gap[i, j])
            if config.surrogate == "cispo":
                objective = np.clip(ratio, 1 - config.clip_low, 1 + config.clip_high) * advantage * theta[i, j]
            elif advantage > 0:
                objective = min(ratio, 1 + config.clip_high) * advantage
            else:
                objective = max(ratio, 1 - config.clip_low) * advantage
                if config.dual_clip is not None:
                    objective = max(objective, config.dual_clip * advantage)
            gap = self.reference[i, j] - theta[i, j]
            kl = {"k1": -gap, "k2": gap**2 / 2, "k3": np.exp(gap) - gap - 1}[config.kl_estimator]
            loss[i, j] = config.kl_coefficient * kl - self.importance(config, i, j) * objective
        return loss

    def importance(self, config: LossConfig, i: int, j: int) -> float:
        if config.importance_cap is None:
            return 1.0
        gap = self.old - self.mu
        weight = np.exp(np.sum(gap[i, self.mask[i]]) if config.importance == "sequence" else gap[i, j])
        if config.importance == "icepop":
            return weight if config.importance_floor <= weight <= config.importance_cap else 0.0
        return min(weight, config.importance_cap)


CONFIGS = [
    LossConfig(),
    LossConfig(clip_low=0.1, clip_high=0.5, importance_cap=None),
    LossConfig(clip_low=0.3, clip_high=0.05, importance_cap=0.9, kl_coefficient=0.2),
    LossConfig(kl_coefficient=1.5),
    LossConfig(ratio="sequence", clip_low=0.02, clip_high=0.03),
    LossConfig(surrogate="cispo", clip_low=1.0, clip_high=0.2),
    LossConfig(surrogate="cispo", ratio="sequence", clip_low=0.02, clip_high=0.03),
    LossConfig(dual_clip=1.2, importance_cap=None),
    LossConfig(importance="sequence", importance_cap=1.5),
    LossConfig(importance="icepop", importance_floor=0.7, importance_cap=1.8),
    LossConfig(kl_estimator="k1", kl_coefficient=0.5),
    LossConfig(kl_estimator="k2", kl_coefficient=0.5),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_loss_and_gradient_match_a_float64_reference(config: LossConfig) -> None:
    """The reference gradient comes from finite differences. Without a penalty, it is 0 where the ratio is clipped."""
    case, step = Case(), 1e-6
    theta = jnp.array(case.theta, jnp.float32)
    np.testing.assert_allclose(case.loss(config), case.expected(config), rtol=1e-4, atol=1e-5)

    expected = np.zeros((ROWS, TOKENS))
    for at in zip(*np.nonzero(case.mask), strict=True):
        shift = np.zeros((ROWS, TOKENS))
        shift[at] = step
        rise = case.expected(config, case.theta + shift) - case.expected(config, case.theta - shift)
        expected[at] = rise.sum() / (2 * step)
    slope = jax.grad(lambda theta: jnp.sum(case.loss(config, theta)))(theta)
    np.testing.assert_allclose(slope, expected, rtol=1e-3, atol=1e-4)
    if config.surrogate == "clipped" and not config.kl_coefficient and config.importance != "icepop":
        clipped = np.asarray(per_token_loss(policy_loss, case.inputs(), config).metrics["clip_fraction"])[case.mask]
        assert 0 < clipped.mean() < 1
        if config.ratio == "token":
            np.testing.assert_array_equal(clipped, expected[case.mask] == 0)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("far", ["anchor", "reference"])
def test_a_token_whose_ratio_overflows_leaves_a_gradient(config: LossConfig, far: str) -> None:
    case = Case()
    {"anchor": case.old, "reference": case.reference}[far][0, np.argmax(case.mask[0])] = -150.0

    def total(theta: jax.Array) -> jax.Array:
        return jnp.sum(case.loss(config, theta))

    # In the opposite direction, the policy's log-prob has fallen as far.
    for sign, low in ((1.0, 0.0), (-1.0, 150.0)):
        case.advantage *= sign
        loss, gradient = jax.value_and_grad(total)(jnp.array(case.theta - low, jnp.float32))
        assert np.isfinite(loss) and np.isfinite(gradient).all()


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (lambda x: LossOutput(jnp.sum(x), {}), "loss_fn: loss...()"),
        (lambda x: LossOutput(x, {"mine": x[0]}), f"loss_fn: mine...({TOKENS},)"),
        (lambda x: LossOutput(x, {"draft": x}), "loss_fn: ...named draft"),
    ],
)
def test_a_loss_of_the_wrong_shape_or_with_a_taken_metric_name_is_refused(output, message: str) -> None:
    with refuses(message):
        per_token_loss(lambda inputs, _: output(inputs.theta), Case().inputs(), LossConfig())


@pytest.mark.parametrize("aggregate", ["token", "sequence", "budget"])
def test_tokens_weigh_as_the_papers_average_them(aggregate) -> None:
    """A sequence without tokens that count is not a sequence."""
    mask = np.random.default_rng(3).random((ROWS, TOKENS)) < 0.6
    mask[2] = False
    value = np.random.default_rng(4).normal(size=(ROWS, TOKENS))
    rows = [row[counts] for row, counts in zip(value, mask, strict=True) if counts.any()]
    expected = {
        "token": np.mean(np.concatenate(rows)),
        "sequence": np.mean([row.mean() for row in rows]),
        "budget": np.mean([row.sum() / 20 for row in rows]),
    }
    weights = token_weights(jnp.array(mask), aggregate, 20)
    np.testing.assert_allclose(np.sum(np.asarray(weights) * value), expected[aggregate], rtol=1e-5)
    assert not token_weights(jnp.zeros((2, 3), bool), aggregate, 20).any()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_reward_pays_for_kl_instead_of_the_loss(estimator: Literal["k1", "k2", "k3"]) -> None:
    """Compare each estimator with float64, token by token."""
    case = Case()
    config = LossConfig(kl_in="reward", kl_coefficient=0.3, kl_estimator=estimator)
    ratio = np.log(np.exp(case.mu - case.reference))
    each = {"k1": ratio, "k2": ratio**2 / 2, "k3": np.exp(-ratio) - 1 + ratio}[estimator]
    mu, reference = (jnp.array(x, jnp.float32) for x in (case.mu, case.reference))
    got = kl_cost(mu, reference, jnp.array(case.mask), config)
    np.testing.assert_allclose(got, 0.3 * np.where(case.mask, each, 0.0), rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(case.loss(config), case.loss(LossConfig()))

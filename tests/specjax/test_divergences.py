"""Divergences and their gradients against sums in float64, and the sampled gradients against the exact one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.divergences import DivergenceName, divergence, reverse_kl
from specjax.train.loss import LossConfig, LossInputs, per_token_loss, policy_loss
from specjax.train.teacher import (
    LIKELIEST,
    Compared,
    TeacherConfig,
    common_laws,
    overlap,
    with_divergence,
    with_teacher_cost,
)
from tests.refusals import refuses

VOCAB, ROWS = 8, 5
NAMES: tuple[tuple[DivergenceName, float], ...] = (("reverse", 0.5), ("forward", 0.5), ("jsd", 0.5), ("jsd", 0.1))


def laws_of(seed: int = 0, scale: float = 2.0) -> tuple[np.ndarray, np.ndarray]:
    """Return float64 logits of a policy and of its teacher, [ROWS, VOCAB]."""
    rng = np.random.default_rng(seed)
    return scale * rng.standard_normal((ROWS, VOCAB)), scale * rng.standard_normal((ROWS, VOCAB))


def softmax(z: np.ndarray) -> np.ndarray:
    return np.exp(z) / np.exp(z).sum(axis=-1, keepdims=True)


def by_sums(z: np.ndarray, other: np.ndarray, name: str, beta: float) -> np.ndarray:
    """Return the divergence from its definition."""
    s, t = softmax(z), softmax(other)

    def kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
        return (p * np.log(p / q)).sum(axis=-1)

    m = beta * t + (1 - beta) * s
    return {"reverse": kl(s, t), "forward": kl(t, s), "jsd": beta * kl(t, m) + (1 - beta) * kl(s, m)}[name]


@jax.jit
def all_of(z: jax.Array, other: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    """Return (divergence [ROWS], gradient of its sum by the logits) for each of NAMES."""
    log_t = jax.nn.log_softmax(other)

    def summed(z: jax.Array, name: DivergenceName, beta: float) -> tuple[jax.Array, jax.Array]:
        each = divergence(jax.nn.log_softmax(z), log_t, name, beta)
        return each.sum(), each

    results = []
    for name, beta in NAMES:
        gradient, each = jax.grad(lambda z, name=name, beta=beta: summed(z, name, beta), has_aux=True)(z)
        results.append((each, gradient))
    return results


def test_values_and_gradients_are_those_of_the_definitions() -> None:
    z, other = laws_of()
    with jax.enable_x64(True):
        found = all_of(jnp.asarray(z), jnp.asarray(other))
        found = [(np.asarray(value), np.asarray(gradient)) for value, gradient in found]
    for (name, beta), (value, gradient) in zip(NAMES, found, strict=True):
        np.testing.assert_allclose(value, by_sums(z, other, name, beta), rtol=1e-12)
        for place in np.ndindex(z.shape):
            step = np.zeros_like(z)
            step[place] = 1e-6
            sides = (by_sums(z + sign * step, other, name, beta)[place[0]] for sign in (1, -1))
            expected = np.subtract(*sides) / 2e-6
            assert abs(gradient[place] - expected) < 1e-8, (name, beta, place)


def test_equal_laws_have_no_divergence_and_no_gradient_to_the_bit() -> None:
    z = jnp.asarray(laws_of()[0], jnp.float32)
    for value, gradient in all_of(z, z):
        np.testing.assert_array_equal(value, 0.0)
        np.testing.assert_array_equal(gradient, 0.0)


def test_laws_far_apart_stay_finite() -> None:
    """Test ids without a token, which have logits of -1e30 in both networks, and certain laws that contradict."""
    z = jnp.array([[0.0, 90.0, -1e30, 1.0]], jnp.float32)
    other = jnp.array([[90.0, 0.0, -1e30, 2.0]], jnp.float32)
    for value, gradient in all_of(z, other):
        assert np.isfinite(value).all() and np.isfinite(gradient).all() and (np.asarray(value) > 0).all()
        assert float(gradient[0, 2]) == 0.0


def test_ids_of_one_vocabulary_only_are_cut() -> None:
    z, other = laws_of()
    padded = jnp.pad(jnp.asarray(other, jnp.float32), ((0, 0), (0, 3)), constant_values=4.0)
    log_s, log_t = common_laws(jax.nn.log_softmax(jnp.asarray(z, jnp.float32)), jax.nn.log_softmax(padded))
    np.testing.assert_allclose(reverse_kl(log_s, log_t), by_sums(z, other, "reverse", 0.5), rtol=1e-5)


def test_overlap_is_the_share_of_common_likeliest_tokens() -> None:
    rng = np.random.default_rng(0)
    log_s, log_t = (jnp.asarray(rng.standard_normal((6, 40)), jnp.float32) for _ in range(2))
    best = [np.argsort(-np.asarray(x), axis=-1)[:, :LIKELIEST] for x in (log_s, log_t)]
    expected = [len({*a} & {*b}) / LIKELIEST for a, b in zip(*best, strict=True)]
    np.testing.assert_allclose(overlap(log_s, log_t), expected, rtol=1e-6)
    np.testing.assert_array_equal(overlap(log_s, log_s), 1.0)


def sampled_gradients(config: TeacherConfig, z: jax.Array, log_t: jax.Array, drawn: jax.Array) -> jax.Array:
    """Return the gradient of the policy's loss by the logits z [V], for each drawn token, [N, V]."""

    def loss(z: jax.Array, token: jax.Array) -> jax.Array:
        log_s = jax.nn.log_softmax(z)
        theta, found = (x[token][None, None] for x in (log_s, log_t))
        exact = divergence(log_s, log_t, "reverse")[None, None]
        mask = jnp.ones((1, 1), bool)
        fixed, zero = jax.lax.stop_gradient(theta), jnp.zeros((1, 1))
        inputs = LossInputs(theta, fixed, fixed, None, zero, mask)
        compared = Compared(theta, exact, zero, zero, zero, found, zero, zero)
        inputs = with_teacher_cost(inputs, compared, config)
        output = per_token_loss(policy_loss, inputs, LossConfig())
        return with_divergence(output.loss, mask, compared, config).sum()

    return jax.vmap(jax.grad(loss), (None, 0))(z, drawn)


def test_sampled_gradients_are_the_exact_one_in_the_mean() -> None:
    """Test the mean over 1e5 draws of both sampled forms. The baseline leaves it, with less variance."""
    draws, (z, other) = 100_000, (jnp.asarray(x[0], jnp.float32) for x in laws_of(seed=1, scale=1.0))
    drawn, log_t = jax.random.categorical(jax.random.key(0), z, shape=(draws,)), jax.nn.log_softmax(other)
    run = jax.jit(sampled_gradients, static_argnums=0)
    exact = np.asarray(run(TeacherConfig("network"), z, log_t, drawn[:1]))[0]
    variances = {}
    for form in ("sampled", "baseline"):
        found = np.asarray(run(TeacherConfig("network", form=form), z, log_t, drawn), np.float64)
        # Five standard errors: eight components, two forms.
        error = found.std(axis=0) / np.sqrt(draws)
        assert (np.abs(found.mean(axis=0) - exact) < 5 * error + 1e-7).all(), form
        assert np.abs(exact).max() > 50 * error.max(), "the draws could not tell the gradient from 0"
        variances[form] = found.var(axis=0).sum()
    assert variances["baseline"] < variances["sampled"]


def test_the_log_ratio_as_a_loss_learns_nothing() -> None:
    """Test what the sampled form must not be: k1 differentiated through the policy has mean 0."""
    z, other = (jnp.asarray(x[0], jnp.float32) for x in laws_of(seed=1, scale=1.0))
    every = jnp.arange(VOCAB)
    by_token = jax.vmap(jax.grad(lambda z, token: jax.nn.log_softmax(z)[token]), (None, 0))(z, every)
    probabilities = jax.nn.softmax(z)
    np.testing.assert_allclose(probabilities @ by_token, 0.0, atol=1e-6)
    cost = jax.nn.log_softmax(z) - jax.nn.log_softmax(other)
    assert float(jnp.abs((probabilities * cost) @ by_token).max()) > 0.05


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"form": "sampled", "divergence": "forward"}, "divergence = forward: must be reverse with form sampled"),
        ({"divergence": "jsd", "beta": 1.0}, "beta = 1.0: must be above 0 and below 1 with jsd"),
    ],
)
def test_contradicting_options_are_refused(options: dict, message: str) -> None:
    with refuses(message):
        TeacherConfig(**options)

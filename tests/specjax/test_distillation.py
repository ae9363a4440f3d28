"""Objectives of a draft, token by token, against float64 numpy and finite differences."""

from dataclasses import replace
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafters import HeadDrafter
from specjax.drafters.distillation import Objective, acceptance, divergence
from tests.refusals import refuses
from tests.tiny import ENUMERABLE

VOCAB = 11
REDUCED = np.array([0, 2, 3, 7, 10])


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def reference(objective: str, log_p: np.ndarray, log_q: np.ndarray, ids: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return value and gradient by the definitions, over the policy's whole vocabulary. weight: of `hybrid`."""
    p, q = np.exp(log_p), np.zeros(log_p.shape)
    q[..., ids] = np.exp(log_q)
    distance = 0.5 * np.abs(p - q).sum(axis=-1)
    known = p[..., ids] / p[..., ids].sum(axis=-1, keepdims=True)
    kl = (known * np.log(known / np.exp(log_q))).sum(axis=-1)
    return {
        "cross_entropy": -(p[..., ids] * log_q).sum(axis=-1),
        "kl": kl,
        "total_variation": distance,
        "hybrid": weight * kl + (1 - weight) * distance,
        "dspark": -0.1 * (p[..., ids] * log_q).sum(axis=-1) + 1.8 * distance,
    }[objective]


@pytest.mark.parametrize("ids", [np.arange(VOCAB), REDUCED], ids=["full", "reduced"])
@pytest.mark.parametrize("objective", get_args(Objective))
def test_value_and_gradient(objective: Objective, ids: np.ndarray):
    generator = np.random.default_rng(0)
    log_p = log_softmax(2 * generator.normal(size=(3, 4, VOCAB)))
    logits, direction = 2 * generator.normal(size=(2, 3, 4, len(ids)))
    weight = np.exp(-3 * np.minimum(np.exp(log_p)[..., ids], np.exp(log_softmax(logits))).sum(axis=-1))
    assert weight.min() < 0.5 < weight.max()

    @jax.jit
    def run(log_p: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        def loss(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
            each = divergence(objective, log_p, jax.nn.log_softmax(logits))
            return each.sum(), each

        gradient, each = jax.grad(loss, has_aux=True)(logits)
        return each, gradient, acceptance(log_p, jax.nn.log_softmax(logits))

    as_float32 = jnp.asarray(log_p[..., ids], jnp.float32), jnp.asarray(logits, jnp.float32)
    each, gradient, alpha = run(*as_float32)
    np.testing.assert_allclose(each, reference(objective, log_p, log_softmax(logits), ids, weight), rtol=1e-4)
    ahead, back = (
        reference(objective, log_p, log_softmax(logits + by * direction), ids, weight).sum() for by in (1e-6, -1e-6)
    )
    np.testing.assert_allclose(np.vdot(gradient, direction), (ahead - back) / 2e-6, rtol=1e-3)
    np.testing.assert_allclose(np.exp(-3 * np.asarray(alpha)), weight, rtol=1e-4)


def test_every_objective_is_minimal_if_both_laws_are_equal():
    """With the full vocabulary, divergences are 0 there, and cross-entropy is the policy's entropy."""
    log_p = jnp.asarray(log_softmax(np.random.default_rng(1).normal(size=(1, 5, VOCAB))), jnp.float32)
    entropy = -np.sum(np.exp(log_p) * np.asarray(log_p), axis=-1)
    for objective in get_args(Objective):
        least = {"cross_entropy": 1.0, "dspark": 0.1}.get(objective, 0.0) * entropy
        np.testing.assert_allclose(divergence(objective, log_p, log_p), least, atol=1e-6)


@pytest.mark.parametrize("changes", [dict(unroll=0), dict(unroll=8), dict(decay=0.0), dict(decay=1.5)], ids=str)
def test_an_objective_that_does_not_train_the_head_is_refused(changes: dict):
    sound, (name, value) = ENUMERABLE.drafters["mtp"], *changes.items()
    assert isinstance(sound, HeadDrafter)
    with refuses(f"{name} = {value}: "):
        replace(sound, **changes)

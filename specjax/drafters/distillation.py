"""Distillation losses of a draft, per token: divergences between the policy's law and the draft's.

p is the policy's full law at the rollout temperature, q the draft's law over its vocabulary D, which may be reduced.
The expected acceptance, alpha = sum over D of min(p, q), uses p without renormalising it over D.
"""

from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.options import above, at_least, at_most

Objective = Literal["cross_entropy", "kl", "total_variation", "hybrid", "dspark"]
HYBRID_DECAY = 3.0
# Passes of a training-time test, and the weight of each relative to the one before.
MOST_PASSES = 7
Passes = Annotated[int, at_least(1), at_most(MOST_PASSES)]
PassDecay = Annotated[float, above(0), at_most(1)]


def divergence(
    objective: Objective, log_p: Float[Array, "B T Vd"], log_q: Float[Array, "B T Vd"]
) -> Float[Array, "B T"]:
    """Return the loss of each token, differentiable in log_q. log_p: log-probs of the tokens of D under the full law.

    cross_entropy:   -sum over D of p log q.
    kl:              KL(p' || q), where p' is p restricted to D and normalised there.
    total_variation: half of sum |p - q|, which is 1 - alpha.
    hybrid:          w kl + (1 - w) (1 - alpha) with w = exp(-3 alpha), without a gradient through w: from kl, from
                     which a poor draft learns faster, to 1 - alpha, the quantity of interest (arXiv 2602.23881).
    dspark:          0.1 cross_entropy + 0.9 sum |p - q| (arXiv 2607.05147; there the cross-entropy is with the token
                     that was sampled from p, here its mean).
    """
    if objective == "cross_entropy":
        return _cross_entropy(log_p, log_q)
    if objective == "kl":
        return _kl(log_p, log_q)
    distance = 1 - acceptance(log_p, log_q)
    if objective == "total_variation":
        return distance
    if objective == "dspark":
        return 0.1 * _cross_entropy(log_p, log_q) + 1.8 * distance
    weight = jax.lax.stop_gradient(jnp.exp(HYBRID_DECAY * (distance - 1)))
    return weight * _kl(log_p, log_q) + (1 - weight) * distance


def acceptance(log_p: Float[Array, "B T Vd"], log_q: Float[Array, "B T Vd"]) -> Float[Array, "B T"]:
    """Return the expected acceptance alpha of each token."""
    return jnp.sum(jnp.minimum(jnp.exp(log_p), jnp.exp(log_q)), axis=-1)


def binary_cross_entropy(target: Float[Array, "B N"], logits: Float[Array, "B N"]) -> Float[Array, "B N"]:
    """Return the binary cross-entropy of sigmoid(logits) with the probability `target`, which gets no gradient."""
    logits = logits.astype(jnp.float32)
    return jax.nn.softplus(logits) - jax.lax.stop_gradient(target) * logits


def _cross_entropy(log_p: Float[Array, "B T Vd"], log_q: Float[Array, "B T Vd"]) -> Float[Array, "B T"]:
    return -jnp.sum(jnp.exp(log_p) * log_q, axis=-1)


def _kl(log_p: Float[Array, "B T Vd"], log_q: Float[Array, "B T Vd"]) -> Float[Array, "B T"]:
    log_p = jax.nn.log_softmax(log_p)
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)

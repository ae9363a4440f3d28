"""Divergences of one law from another, exact over the vocabulary, by position; their gradients are closed forms.

The gradient with respect to logits z of s, the policy's law, is the field's: s (d - K) of the reverse KL K, with d the
log-ratio; s - t of the forward KL. Differentiating the sums themselves would leave rounding where both laws are equal:
here value and gradient are then exactly 0.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

DivergenceName = Literal["reverse", "forward", "jsd"]


def reverse_kl(log_s: Float[Array, "... V"], log_t: Float[Array, "... V"]) -> Float[Array, "..."]:
    """Return KL(s || t) without a gradient. log_s, log_t: log-probs, finite."""
    log_s, log_t = jax.lax.stop_gradient((log_s, log_t))
    return jnp.sum(jnp.exp(log_s) * (log_s - log_t), axis=-1)


def divergence(
    log_s: Float[Array, "... V"], log_t: Float[Array, "... V"], name: DivergenceName, beta: float = 0.5
) -> Float[Array, "..."]:
    """Return the divergence of s from t, differentiable with respect to the logits of s only.

    log_s, log_t: log-probs, finite. name: reverse: KL(s || t); forward: KL(t || s); jsd: beta KL(t || m) + (1 - beta)
    KL(s || m) with m = beta t + (1 - beta) s (GKD, arXiv 2306.13649, equation 1).
    """
    fixed_s, log_t = jax.lax.stop_gradient((log_s, log_t))
    s, t, log_ratio = jnp.exp(fixed_s), jnp.exp(log_t), fixed_s - log_t
    match name:
        case "reverse":
            value = jnp.sum(s * log_ratio, axis=-1)
            slope = s * (log_ratio - value[..., None])
        case "forward":
            value, slope = jnp.sum(t * -log_ratio, axis=-1), s - t
        case "jsd":
            above_s, above_t = _mixture_over(log_ratio, beta)
            of_s = -jnp.sum(s * above_s, axis=-1)
            value = (1 - beta) * of_s - beta * jnp.sum(t * above_t, axis=-1)
            slope = (1 - beta) * s * (-above_s - of_s[..., None])
    # The second term is 0. Its derivative by log_s is `slope`, which log_softmax passes to the logits: it sums to 0.
    return value + jnp.sum(jax.lax.stop_gradient(slope) * (log_s - fixed_s), axis=-1)


def _mixture_over(log_ratio: Float[Array, "... V"], beta: float) -> tuple[Array, Array]:
    """Return log(m / s) and log(m / t) for log_ratio = log(s / t), exactly 0 where it is; no exponential overflows."""
    small = jnp.expm1(-jnp.abs(log_ratio))
    # Above 0, s is the larger law, and m / s is 1 + beta (t / s - 1).
    over_larger = jnp.log1p(jnp.where(log_ratio > 0, beta, 1 - beta) * small)
    over_smaller = over_larger + jnp.abs(log_ratio)
    s_larger = log_ratio > 0
    return jnp.where(s_larger, over_larger, over_smaller), jnp.where(s_larger, over_smaller, over_larger)

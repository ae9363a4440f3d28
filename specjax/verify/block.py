"""Block verification (Sun et al. 2024, arXiv 2403.10444): drafts are accepted as a block, for at least as many tokens.

A token that the policy likes more than the draft makes up for one before it that the policy likes less.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.verify.law import AcceptLaw, log_ratio


def block_law(
    log_p: Float[Array, "B T V"], log_q: Float[Array, "B K V"], draft: Int[Array, "B K"], length: Int[Array, "B"]
) -> AcceptLaw:
    """The law of `block` for one round, arguments as for `accept_law`: arXiv 2403.10444, algorithm 2.

    With p and q given the first i drafted tokens x_1 .. x_i, of n = length:

        P_0 = 1,  P_i = min(1, P_{i-1} p(x_i) / q(x_i))
        h_i = Z_i / (Z_i + 1 - P_i),  Z_i = sum_v max(P_i p(v) - q(v), 0);  h_n = P_n

    The paper accepts as many tokens as the last i whose own uniform is below h_i. Given the draft these uniforms
    matter through that maximum alone, and more than i are accepted with probability 1 - (1 - h_{i+1}) .. (1 - h_n):
    one uniform draws it. The residual is max(P_i p - q, 0).
    """
    ratio = log_ratio(log_p, log_q, draft, length)
    running = [jnp.zeros_like(log_p[:, 0, 0])]
    for i in range(draft.shape[1]):
        running.append(jnp.minimum(running[-1] + ratio[:, i], 0.0))
    log_weight = jnp.stack(running, axis=1)

    # P_i itself at i = n; beyond it P is 0, and with it h.
    inner, threshold = log_weight[:, 1:-1], jnp.exp(log_weight[:, 1:])
    left = jnp.sum(jnp.maximum(jnp.exp(log_p[:, 1:-1] + inner[..., None]) - jnp.exp(log_q[:, 1:]), 0.0), axis=-1)
    total = left - jnp.expm1(inner)
    before = jnp.where(total > 0, left / jnp.where(total > 0, total, 1.0), 1.0)
    inside = jnp.arange(1, draft.shape[1])[None] < length[:, None]
    threshold = threshold.at[:, :-1].set(jnp.where(inside, before, threshold[:, :-1]))

    survival = 1 - jax.lax.cumprod(1 - threshold, axis=1, reverse=True)
    return AcceptLaw(survival, log_p, log_q, length, log_weight)

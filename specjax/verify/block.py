"""Block verification (Sun et al. 2024, arXiv 2403.10444), which decides on the drafted tokens of a round jointly.

A token with p > q makes up for an earlier one with p < q, so that in expectation at least as many tokens are accepted
as by token-level rejection.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.verify.law import AcceptLaw, log_ratio


def block_law(
    log_p: Float[Array, "B T V"], log_q: Float[Array, "B K V"], draft: Int[Array, "B K"], length: Int[Array, "B"]
) -> AcceptLaw:
    """Return the accept law of `block` for one round: arXiv 2403.10444, algorithm 2. Arguments as for `accept_law`.

    With p and q conditioned on the first i drafted tokens x_1 .. x_i, of n = length:

        P_0 = 1,  P_i = min(1, P_{i-1} p(x_i) / q(x_i))
        h_i = Z_i / (Z_i + 1 - P_i),  Z_i = sum_v max(P_i p(v) - q(v), 0);  h_n = P_n

    The paper draws a uniform for each i and accepts as many tokens as the largest i whose uniform is below h_i. Given
    the draft, only this maximum matters: more than i tokens are accepted with probability
    1 - (1 - h_{i+1}) .. (1 - h_n), so that one uniform is enough. The residual is max(P_i p - q, 0), normalised.
    """
    ratio = log_ratio(log_p, log_q, draft, length)
    running = [jnp.zeros_like(log_p[:, 0, 0])]
    for i in range(draft.shape[1]):
        running.append(jnp.minimum(running[-1] + ratio[:, i], 0.0))
    log_weight = jnp.stack(running, axis=1)

    # h_n = P_n. Beyond n, P is 0 and so is h.
    inner, threshold = log_weight[:, 1:-1], jnp.exp(log_weight[:, 1:])
    left = jnp.sum(jnp.maximum(jnp.exp(log_p[:, 1:-1] + inner[..., None]) - jnp.exp(log_q[:, 1:]), 0.0), axis=-1)
    total = left - jnp.expm1(inner)
    before = jnp.where(total > 0, left / jnp.where(total > 0, total, 1.0), 1.0)
    inside = jnp.arange(1, draft.shape[1])[None] < length[:, None]
    threshold = threshold.at[:, :-1].set(jnp.where(inside, before, threshold[:, :-1]))

    survival = 1 - jax.lax.cumprod(1 - threshold, axis=1, reverse=True)
    return AcceptLaw(survival, log_p, log_q, length, log_weight)

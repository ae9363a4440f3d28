"""Verification by an accept law: the probability of each outcome, as a deterministic function of the draft.

A test can enumerate the law; `draw` samples from it. `accept_law` is the law of token-level speculative sampling.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.keys import Purpose, gumbels, uniforms
from specjax.sampling import pick, sample
from specjax.verify.base import Noise, Verdict, Verifier


class AcceptLaw(NamedTuple):
    """Law of a round given its draft.

    Attributes:
        survival:   [B, K], probability that more than i drafted tokens are accepted: non-increasing in i.
        log_p:      [B, K+1, V], the policy's processed log-probs.
        log_q:      [B, K, V], the drafter's processed log-probs.
        length:     int32 [B], 0 .. K, number of drafted tokens.
        log_weight: [B, K+1], log of the factor on p in the residual after i accepted tokens.
    """

    survival: Float[Array, "B K"]
    log_p: Float[Array, "B T V"]
    log_q: Float[Array, "B K V"]
    length: Int[Array, "B"]
    log_weight: Float[Array, "B T"]

    def stop(self) -> Float[Array, "B T"]:
        """Return the probability that exactly m drafted tokens are accepted, m = 0 .. K."""
        padded = jnp.pad(self.survival, ((0, 0), (1, 0)), constant_values=1.0)
        return padded - jnp.pad(self.survival, ((0, 0), (0, 1)))

    def residual(self, accepted: Int[Array, "B"]) -> Float[Array, "B V"]:
        """Return log-probs of the token after `accepted` drafted tokens: max(weight p - q, 0), normalised.

        It is p if all drafted tokens are accepted, or if rounding leaves no mass (p equal to q). Only position
        `accepted` of each row is read.
        """
        log_p = jnp.take_along_axis(self.log_p, accepted[:, None, None], axis=1)[:, 0]
        count = self.log_q.shape[1]
        if count == 0:
            return log_p
        row = jnp.minimum(accepted, count - 1)[:, None, None]
        log_q = jnp.take_along_axis(self.log_q, row, axis=1)[:, 0]
        log_q = jnp.where((accepted < self.length)[:, None], log_q, -jnp.inf)
        weighted = log_p + jnp.take_along_axis(self.log_weight, accepted[:, None], axis=1)
        gap = log_q - weighted
        left = jnp.where(gap < 0, weighted + jnp.log(-jnp.expm1(jnp.where(gap < 0, gap, -1.0))), -jnp.inf)
        has_mass = jnp.any(left > -jnp.inf, axis=-1, keepdims=True)
        return jax.nn.log_softmax(jnp.where(has_mass, left, log_p))


LawOf = Callable[[Array, Array, Array, Array], AcceptLaw]
"""(log_p, log_q, draft, length) -> AcceptLaw, arguments as for `accept_law`."""


def accept_law(
    log_p: Float[Array, "B T V"], log_q: Float[Array, "B K V"], draft: Int[Array, "B K"], length: Int[Array, "B"]
) -> AcceptLaw:
    """Return the accept law of `rejection` for one round: arXiv 2211.17192, algorithm 1, in log space.

    log_p, log_q: normalised processed log-probs; q is over the full vocabulary, minus infinity where it has no mass.
    draft:        the proposal, a true sample of q (or the one token of a deterministic q).
    length:       0 .. K, number of its tokens that count.
    """
    ratio = jnp.exp(jnp.minimum(log_ratio(log_p, log_q, draft, length), 0.0))
    return AcceptLaw(jnp.cumprod(ratio, axis=1), log_p, log_q, length, jnp.zeros_like(log_p[..., 0]))


def log_ratio(log_p: Array, log_q: Array, draft: Array, length: Array) -> Float[Array, "B K"]:
    """Return log(p / q) of each drafted token; minus infinity beyond `length` and where p or q is 0."""
    log_pd, log_qd = pick(log_p[:, :-1], draft), pick(log_q, draft)
    counts = jnp.arange(draft.shape[1])[None] < length[:, None]
    possible = counts & (log_pd > -jnp.inf) & (log_qd > -jnp.inf)
    return jnp.where(possible, jnp.where(possible, log_pd - log_qd, 0.0), -jnp.inf)


def draw(law: AcceptLaw, noise: Noise) -> Verdict:
    """Draw a verdict: compare one uniform with the survival probabilities, then sample the residual.

    The number accepted may not be changed here, because a sampled token may not be discarded after its value was
    seen: to accept fewer, pass the law a smaller `length`. The comparison is strict: float32 uniforms contain an exact
    0, which must not accept a token of p = 0.
    """
    accepted = jnp.sum(noise.uniform[:, None] < law.survival, axis=1, dtype=jnp.int32)
    return Verdict(accepted, sample(law.residual(accepted), noise.emit[:, 0]))


def verifier_of(law_of: LawOf) -> Verifier:
    """Return the verifier that draws from this law, with fresh noise in each round."""

    def verify(log_p: Array, log_q: Array, draft: Array, length: Array, noise: Noise) -> Verdict:
        return draw(law_of(log_p, log_q, draft, length), noise)

    return Verifier(independent_noise, verify)


def independent_noise(keys: Array, start: Array, draft_length: int, vocab: int) -> Noise:
    """Return noise keyed by the round's start position.

    If it were keyed by absolute position, a round would reuse noise that the round before has read beyond its last
    emitted token, which would bias the law.
    """
    return Noise(
        draft=gumbels(keys, start, Purpose.DRAFT, draft_length * vocab).reshape(len(keys), draft_length, vocab),
        uniform=uniforms(keys, start, Purpose.ACCEPT),
        emit=gumbels(keys, start, Purpose.RESIDUAL, vocab)[:, None],
    )

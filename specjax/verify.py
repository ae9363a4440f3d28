"""Verification: how many drafted tokens are kept, and which token comes next.

Pure, static shapes, ragged draft lengths, noise in as arrays. Two verifiers behind one interface:

- `rejection`, token-level speculative sampling (Leviathan et al. 2023, arXiv 2211.17192, algorithm 1; Chen et al. 2023,
  arXiv 2302.01318): the emitted tokens follow the policy's law exactly.
- `coupled`, Gumbel coupling (Daliri et al. 2024, arXiv 2408.07978): draft and policy share the noise of each position,
  so that the emitted tokens are those of plain sampling with that noise, whatever was drafted.

`accept_law` is the deterministic half of `rejection`, which a test can enumerate; `draw` is the other half.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from specjax.keys import Purpose, gumbels, uniforms
from specjax.sampling import pick, sample


class Noise(NamedTuple):
    """All the randomness of a round.

    draft:   [B, K, V] Gumbels with which the drafter samples its proposal.
    uniform: [B] in [0, 1), decides how many drafts `rejection` accepts.
    emit:    Gumbels with which the token after them is drawn: [B, 1, V], or [B, K+1, V] for `coupled`.
    """

    draft: Float[Array, "B K V"]
    uniform: Float[Array, "B"]
    emit: Float[Array, "B rows V"]


class Verdict(NamedTuple):
    """accepted: int32 [B], 0 .. K, the drafts kept. token: int32 [B], the one emitted after them."""

    accepted: Int[Array, "B"]
    token: Int[Array, "B"]


class AcceptLaw(NamedTuple):
    """The law of a round given its draft.

    survival: [B, K], probability that more than i drafted tokens are accepted: non-increasing in i.
    log_p:    [B, K+1, V], the policy's processed log-probs.
    log_q:    [B, K, V], the drafter's.
    length:   int32 [B], 0 .. K, how many rows of log_q hold a draft.
    """

    survival: Float[Array, "B K"]
    log_p: Float[Array, "B T V"]
    log_q: Float[Array, "B K V"]
    length: Int[Array, "B"]

    def stop(self) -> Float[Array, "B T"]:
        """Probability that exactly m drafted tokens are accepted, m = 0 .. K."""
        padded = jnp.pad(self.survival, ((0, 0), (1, 0)), constant_values=1.0)
        return padded - jnp.pad(self.survival, ((0, 0), (0, 1)))

    def residual(self, accepted: Int[Array, "B"]) -> Float[Array, "B V"]:
        """Log-probs of the token emitted after `accepted` drafts: max(p - q, 0) normalised; p after a full accept.

        Where rounding leaves no mass at all (p equal to q), the law is p. Only the rows at `accepted` are touched.
        """
        log_p = jnp.take_along_axis(self.log_p, accepted[:, None, None], axis=1)[:, 0]
        count = self.log_q.shape[1]
        if count == 0:
            return log_p
        row = jnp.minimum(accepted, count - 1)[:, None, None]
        log_q = jnp.take_along_axis(self.log_q, row, axis=1)[:, 0]
        log_q = jnp.where((accepted < self.length)[:, None], log_q, -jnp.inf)
        above = log_p > log_q
        gap = jnp.where(above, log_q - log_p, -1.0)
        left = jnp.where(above, log_p + jnp.log(-jnp.expm1(gap)), -jnp.inf)
        some = jnp.any(left > -jnp.inf, axis=-1, keepdims=True)
        return jax.nn.log_softmax(jnp.where(some, left, log_p))


def accept_law(
    log_p: Float[Array, "B T V"], log_q: Float[Array, "B K V"], draft: Int[Array, "B K"], length: Int[Array, "B"]
) -> AcceptLaw:
    """The law of `rejection` for one round: arXiv 2211.17192, algorithm 1, in log space.

    log_p, log_q: normalised processed log-probs; q is over the full vocabulary, minus infinity where it has no mass.
    draft:        the proposal, a true sample of q (or the one token of a deterministic q).
    length:       0 .. K, how many of its tokens count.
    """
    counts = jnp.arange(draft.shape[1])[None] < length[:, None]
    log_pd, log_qd = pick(log_p[:, :-1], draft), pick(log_q, draft)
    possible = counts & (log_pd > -jnp.inf) & (log_qd > -jnp.inf)
    ratio = jnp.where(possible, jnp.exp(jnp.minimum(jnp.where(possible, log_pd - log_qd, 0.0), 0.0)), 0.0)
    return AcceptLaw(jnp.cumprod(ratio, axis=1), log_p, log_q, length)


def draw(law: AcceptLaw, noise: Noise) -> Verdict:
    """One uniform against the survival probabilities, then a draw from the residual.

    The comparison is strict: float32 uniforms contain an exact 0, which must not accept a token of p = 0.
    """
    accepted = jnp.sum(noise.uniform[:, None] < law.survival, axis=1, dtype=jnp.int32)
    return Verdict(accepted, sample(law.residual(accepted), noise.emit[:, 0]))


@dataclass(frozen=True)
class Verifier:
    """A way to verify: the noise it wants for a round, and its verdict on a proposal.

    noise:    (sequence keys [B], position of the first token the round emits [B], K, V) -> Noise
    verify:   (log_p, log_q, draft, length, noise) -> Verdict, arguments as for `accept_law`.
    promises: the least probability that a draft's first token is accepted where sum_v min(p, q) is the argument.
    """

    noise: Callable[[UInt32[Array, "B 2"], Int[Array, "B"], int, int], Noise]
    verify: Callable[[Array, Array, Array, Array, Noise], Verdict]
    promises: Callable[[Array], Array] = lambda overlap: overlap


def _independent_noise(keys: Array, start: Array, draft_length: int, vocab: int) -> Noise:
    """Keyed by the round's start: by absolute position alone, noise that a round looked at beyond its cut would be
    drawn again by the next one.
    """
    return Noise(
        draft=gumbels(keys, start, Purpose.DRAFT, draft_length * vocab).reshape(len(keys), draft_length, vocab),
        uniform=uniforms(keys, start, Purpose.ACCEPT),
        emit=gumbels(keys, start, Purpose.RESIDUAL, vocab)[:, None],
    )


def _verify_rejection(log_p: Array, log_q: Array, draft: Array, length: Array, noise: Noise) -> Verdict:
    return draw(accept_law(log_p, log_q, draft, length), noise)


def _coupled_noise(keys: Array, start: Array, draft_length: int, vocab: int) -> Noise:
    """Keyed by absolute position: the same whichever round, drafter or draft length asks for it."""
    positions = start[:, None] + jnp.arange(draft_length + 1)[None]
    shared = gumbels(keys, positions, Purpose.COUPLED, vocab)
    return Noise(draft=shared[:, :-1], uniform=jnp.zeros(len(keys), jnp.float32), emit=shared)


def _verify_coupled(log_p: Array, log_q: Array, draft: Array, length: Array, noise: Noise) -> Verdict:
    """Arxiv 2408.07978, section 3: the policy's own draw is emitted, a draft is kept while it equals it."""
    tokens = sample(log_p, noise.emit)
    agree = (tokens[:, :-1] == draft) & (jnp.arange(draft.shape[1])[None] < length[:, None])
    accepted = jnp.sum(jnp.cumprod(agree, axis=1), axis=1, dtype=jnp.int32)
    return Verdict(accepted, jnp.take_along_axis(tokens, accepted[:, None], axis=1)[:, 0])


VERIFIERS = {
    "rejection": Verifier(_independent_noise, _verify_rejection),
    # (1 - tv) / (1 + tv) of arXiv 2408.07978, where the total variation tv is 1 - overlap.
    "coupled": Verifier(_coupled_noise, _verify_coupled, promises=lambda overlap: overlap / (2 - overlap)),
}

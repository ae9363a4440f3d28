"""Gumbel coupling (Daliri et al. 2024, arXiv 2408.07978): draft and policy share the noise of each position."""

import jax.numpy as jnp
from jaxtyping import Array

from specjax.keys import Purpose, gumbels
from specjax.sampling import sample
from specjax.verify.base import Noise, Verdict


def coupled_noise(keys: Array, start: Array, draft_length: int, vocab: int) -> Noise:
    """Return noise keyed by absolute position: the same for every round, drafter and draft length."""
    positions = start[:, None] + jnp.arange(draft_length + 1)[None]
    shared = gumbels(keys, positions, Purpose.COUPLED, vocab)
    return Noise(draft=shared[:, :-1], uniform=jnp.zeros(len(keys), jnp.float32), emit=shared)


def verify_coupled(log_p: Array, log_q: Array, draft: Array, length: Array, noise: Noise) -> Verdict:
    """Emit the policy's own draws: drafted tokens are accepted as long as they equal them (arXiv 2408.07978)."""
    tokens = sample(log_p, noise.emit)
    agree = (tokens[:, :-1] == draft) & (jnp.arange(draft.shape[1])[None] < length[:, None])
    accepted = jnp.sum(jnp.cumprod(agree, axis=1), axis=1, dtype=jnp.int32)
    return Verdict(accepted, jnp.take_along_axis(tokens, accepted[:, None], axis=1)[:, 0])

"""Derived randomness: every draw's key is a function of what is drawn, never of when or where.

A key is folded from (seed, step, prompt id, sample, position, purpose), so that noise depends on no batch order, slot,
mesh or number of rounds.
"""

from enum import IntEnum

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key


class Purpose(IntEnum):
    """What a draw is for; streams of different purposes never meet."""

    COUPLED = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


SeedStep = tuple[Int[Array, ""], Int[Array, ""]]


def seed_step(seed: int, step: int) -> SeedStep:
    """The (seed, step) pair that a rollout function receives, as int32 scalars."""
    return jnp.int32(seed), jnp.int32(step)


def sequence_keys(seed_step: SeedStep, ids: Int[Array, "R"], samples: Int[Array, "R"]) -> Key[Array, "R"]:
    """One key a sequence, from the run's seed, the step, the prompt's id and the sample's number within its group."""
    seed, step = seed_step
    root = jax.random.fold_in(jax.random.key(seed), step)
    return jax.vmap(lambda id, sample: jax.random.fold_in(jax.random.fold_in(root, id), sample))(ids, samples)


def coupled_gumbel(keys: Key[Array, "B"], start: Int[Array, "B"], count: int, vocab: int) -> Float[Array, "B T V"]:
    """Gumbels for positions start .. start + count - 1, keyed by absolute position alone (arXiv 2408.07978).

    The same (sequence, position) gets the same noise whichever round, drafter or draft length asks for it.
    """

    def row(key: Array, position: Array) -> Array:
        return gumbel(_fold(key, position, Purpose.COUPLED), (vocab,))

    positions = start[:, None] + jnp.arange(count)[None]
    return jax.vmap(jax.vmap(row, in_axes=(None, 0)))(keys, positions)


def round_keys(keys: Key[Array, "B"], start: Int[Array, "B"], purpose: Purpose) -> Key[Array, "B"]:
    """One key a row for the round whose first emitted position is `start`.

    Draft, accept and residual noise is keyed by the round's start: keyed by absolute position alone, noise that a
    round looked at beyond its cut would be drawn again by the next one.
    """
    return jax.vmap(lambda key, position: _fold(key, position, purpose))(keys, start)


def gumbel(key: Key[Array, ""], shape: tuple[int, ...]) -> Float[Array, "..."]:
    """Standard Gumbels, float32. The default range cannot represent tokens of p < 1e-7, hence mode="high"."""
    return jax.random.gumbel(key, shape, jnp.float32, mode="high")


def _fold(key: Array, position: Array, purpose: Purpose) -> Array:
    return jax.random.fold_in(jax.random.fold_in(key, position), int(purpose))

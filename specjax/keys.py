"""Counter-based random numbers: every draw is a function of its key and counter, with no state.

A sequence's key is folded from (seed, step, prompt id, sample). A draw hashes it with a counter made of position,
purpose and index. The noise therefore does not depend on batch order, slot, mesh or number of rounds.
"""

from enum import IntEnum

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32


class Purpose(IntEnum):
    """Purpose of a draw. Draws of different purposes never share a counter."""

    COUPLED = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


# The run's seed, and the step; of sequences that began in several, the step of each.
SeedStep = tuple[Int[Array, ""], Int[Array, "*R"]]

INDEX_BITS = 30
ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)


def seed_step(seed: int, step: int) -> SeedStep:
    """Return the (seed, step) pair that a rollout function takes, as int32 scalars."""
    return jnp.int32(seed), jnp.int32(step)


def sequence_keys(seed_step: SeedStep, ids: Int[Array, "R"], samples: Int[Array, "R"]) -> UInt32[Array, "R 2"]:
    """Return one key per sequence, from the run's seed, the step, the prompt id and the sample's index in its group."""
    seed, step = seed_step
    keys = jnp.broadcast_to(jax.random.key(seed, impl="threefry2x32"), ids.shape)
    for data in (step, ids, samples):
        keys = jax.vmap(jax.random.fold_in)(keys, jnp.broadcast_to(data, ids.shape))
    return jax.random.key_data(keys)


def environment_keys(keys: UInt32[Array, "R 2"]) -> UInt32[Array, "R 2"]:
    """Return the key of each sequence's environment, independent of all draws of the sequence."""
    return jax.vmap(lambda key: jax.random.key_data(jax.random.fold_in(key, 0)))(jax.random.wrap_key_data(keys))


def gumbels(
    keys: UInt32[Array, "B 2"], positions: Int[Array, "B *rest"], purpose: Purpose, count: int
) -> Float[Array, "B *rest count"]:
    """Return standard Gumbel noise, float32, `count` values for each position.

    Computed as -log(-log(1 - w)) from a uniform w in (0, 1). Near 0, where large noise comes from, w has a resolution
    of 2^-48: with multiples of 2^-24, tokens of p < 1e-7 could never be drawn.
    """
    high, low = (x.astype(jnp.float32) for x in _words(keys, positions, purpose, count))
    w = jnp.minimum((high + (low + 0.5) * 2.0**-24) * 2.0**-24, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-w))


def uniforms(keys: UInt32[Array, "B 2"], positions: Int[Array, "B"], purpose: Purpose) -> Float[Array, "B"]:
    """Return one uniform draw from the multiples of 2^-24 in [0, 1) for each position, float32."""
    return _words(keys, positions, purpose, 1)[0][:, 0].astype(jnp.float32) * 2.0**-24


def _words(keys: Array, positions: Array, purpose: Purpose, count: int) -> tuple[Array, Array]:
    """Return two words of 24 random bits for each (key, position, purpose, index), int32 [B, *rest, count]."""
    if count >= 2**INDEX_BITS:
        raise ValueError(f"{count} draws at a position: must be less than 2^{INDEX_BITS}")
    index = jnp.arange(count, dtype=jnp.uint32) | jnp.uint32(purpose << INDEX_BITS)
    ones = (1,) * positions.ndim
    first, second = (keys[:, i].reshape(-1, *ones) for i in range(2))
    words = threefry(first, second, positions[..., None].astype(jnp.uint32), index.reshape(*ones, -1))
    high, low = ((x >> 8).astype(jnp.int32) for x in words)
    return high, low


def threefry(key_1: Array, key_2: Array, x_1: Array, x_2: Array) -> tuple[Array, Array]:
    """Return the Threefry-2x32 hash with 20 rounds (Salmon et al. 2011) of uint32 arrays that broadcast.

    jax hashes its keys with the same function, but compiles it to a loop on CPU and to a separate kernel on GPU. This
    one fuses with the operation that reads it.
    """
    keys = key_1, key_2, key_1 ^ key_2 ^ jnp.uint32(0x1BD11BDA)
    x_1, x_2 = x_1 + key_1, x_2 + key_2
    for group in range(5):
        for distance in ROTATIONS[group % 2]:
            x_1 = x_1 + x_2
            x_2 = x_1 ^ (x_2 << distance | x_2 >> (32 - distance))
        x_1, x_2 = x_1 + keys[(group + 1) % 3], x_2 + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x_1, x_2

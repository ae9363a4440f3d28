"""Anchors: completion tokens of each row at which alone a draft learns in a step.

Each is position 1 of a draft. In RL they are drawn without replacement, and weighted by the tokens they stand for, so
that the sum over the anchors is an unbiased estimate of the sum over all tokens. Distillation takes all tokens.
"""

from dataclasses import replace
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, UInt32

from specjax.drafters.base import Anchors
from specjax.keys import Purpose, SeedStep, gumbels, sequence_keys
from specjax.train.batch import Sequences

S = TypeVar("S", bound=Sequences)
# A draft predicts from the third token of a row on.
FIRST_PREDICTED = 2


def with_keys(sequences: S, seed_step: SeedStep, source: int) -> S:
    """Return rows [.., R] with a key each, from the seed, the step, their numbers and `source`, 0 or above.

    Rows of different sources differ in their draws. No key is that of a rollout's sequence, whose sample is 0 or above.
    """
    shape = sequences.tokens.shape[:-1]
    number = jnp.arange(sequences.tokens[..., 0].size, dtype=jnp.int32)
    keys = sequence_keys(seed_step, number, jnp.full_like(number, -1 - source))
    return replace(sequences, keys=keys.reshape(*shape, 2))


def draw_anchors(keys: UInt32[Array, "R 2"], completion: Bool[Array, "R S"], count: int) -> Anchors:
    """Return up to `count` anchors of each row. The draw depends on the row's key and its completion tokens alone."""
    column = jnp.arange(completion.shape[1])[None]
    candidates = completion & (column >= FIRST_PREDICTED)
    noise = gumbels(keys, jnp.zeros(len(keys), jnp.int32), Purpose.DRAFT, completion.shape[1])
    _, drawn = jax.lax.top_k(jnp.where(candidates, noise, -jnp.inf), min(count, completion.shape[1]))
    index = jnp.sort(drawn, axis=1)
    available = jnp.sum(candidates, axis=1, keepdims=True, dtype=jnp.float32)
    weight = available / jnp.clip(available, 1.0, float(count))
    return Anchors(index, jnp.where(jnp.take_along_axis(candidates, index, axis=1), weight, 0.0))


def all_anchors(completion: np.ndarray, count: int) -> Anchors:
    """Return the completion tokens of rows, bool [R, S], as anchors [R, min(count, S)], computed on the host.

    The draft's later passes and its vocabulary head then run over `count` tokens of a row instead of S. Raises
    ValueError if a row has more of them.
    """
    most = int(completion.sum(axis=1).max())
    if most > count:
        raise ValueError(f"count = {count}: must be at least {most}, the completion tokens of a row")
    candidates = completion & (np.arange(completion.shape[1]) >= FIRST_PREDICTED)
    index = np.sort(np.argsort(~candidates, axis=1, kind="stable")[:, :count], axis=1).astype(np.int32)
    return Anchors(index, np.take_along_axis(candidates, index, axis=1).astype(np.float32))  # pyright: ignore[reportArgumentType]

"""Anchors: completion tokens of each row at which alone a draft learns in a step.

Each is position 1 of a draft. In RL they are drawn without replacement, and weighted by the tokens they stand for, so
that the sum over the anchors is an unbiased estimate of the sum over all tokens. Distillation takes all tokens, or one
in `Drafter.stride`.
"""

from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32

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


def every_anchor(place: Int[Array, "R N"], completion: Bool[Array, "R S"]) -> Anchors:
    """Return as anchors all of these tokens that belong to the completion. The others have no weight."""
    counted = jnp.take_along_axis(completion, place, axis=1) & (place >= FIRST_PREDICTED)
    return Anchors(place, counted.astype(jnp.float32))


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


def spaced_anchors(completion: Any, count: int, stride: int, offset: Any) -> Anchors:
    """Return every `stride`-th completion token of rows, bool [R, S], as anchors [R, count / stride], equally weighted.

    The draft's later passes and its vocabulary head then run over these tokens instead of S. Computed by numpy or JAX,
    whichever made the arrays.

    count:  at least the completion tokens of any row.
    offset: int [R], where the anchors of each row begin, modulo `stride`. Over `stride` successive offsets they are all
            tokens. Offsets should differ among rows, since answers may have a pattern.
    """
    xp = completion.__array_namespace__()
    candidates = completion & (xp.arange(completion.shape[1]) >= FIRST_PREDICTED)[None]
    available = xp.sum(candidates, axis=1, keepdims=True, dtype=xp.int32)
    number = xp.cumsum(candidates, axis=1, dtype=xp.int32) - 1
    first = offset[:, None] % xp.clip(available, 1, stride)
    chosen = candidates & (number % stride == first)
    index = xp.argsort(~chosen, axis=1, stable=True)[:, : -(-count // stride)]
    index = xp.sort(index, axis=1).astype(xp.int32)
    each = available / xp.maximum(xp.sum(chosen, axis=1, keepdims=True, dtype=xp.int32), 1)
    weight = xp.where(xp.take_along_axis(chosen, index, axis=1), each, 0)
    return Anchors(index, weight.astype(xp.float32))

"""Computation in chunks of positions, so that arrays that grow with the square of a row never exist as a whole."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array


def by_position(function: Callable[..., Any], chunk: int, *arrays: Array) -> Any:
    """Return `function(*arrays)`, computed for at most `chunk` positions of every row at a time; 0: all at once.

    `function` must treat each position by itself. Arrays and results are [B, T, ..]. The backward pass computes each
    chunk again. Chunks split positions, not rows, so that rows stay on their shards.
    """
    count = arrays[0].shape[1]
    if not 0 < chunk < count:
        return function(*arrays)
    # Chunks of equal size, so that little is padded: of multiples of 8, or GPUs pad the products of each.
    equal = -(-count // -(-count // chunk))
    chunk = min(equal + -equal % 8, chunk)
    missing = -count % chunk

    def cut(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(len(x), -1, chunk, *x.shape[2:]), 1, 0)

    def join(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(len(x), -1, *x.shape[3:])[:, :count]

    # The loop already keeps XLA from sharing values with the forward pass, so the CSE barrier is not needed.
    rematerialized = jax.checkpoint(lambda parts: function(*parts), prevent_cse=False)
    return jax.tree.map(join, jax.lax.map(rematerialized, tuple(map(cut, arrays))))

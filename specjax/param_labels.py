"""Which parameters are matrices, and which of their axes a product contracts: what optimisers know of a network.

Told by the names that flax's layers give and by what the last modules are called, so that a network of one's own is
read right where it keeps to these:

- a bias is called `bias`, whatever its rank, and is none; nor is what has one axis, norms and the like;
- embeddings and vocabulary heads have one of the names EMBEDDINGS on their path;
- the kernel that brings attention's heads together has one of the names OUTPUTS on its path, and contracts all axes but
  its last; any other kernel contracts its first, and what follows are heads and their width.
"""

from typing import Any

import jax
import optax
from jaxtyping import Array

from specjax.types import PyTree

EMBEDDINGS = {"embed", "embedding", "head", "lm_head"}
OUTPUTS = {"o", "out", "o_proj"}


def matrices(params: PyTree) -> PyTree:
    """For each parameter whether it is a matrix, embeddings and vocabulary heads included."""
    return jax.tree.map_with_path(lambda path, x: _is_matrix(_names(path), x), params)


def hidden_matrices(params: PyTree) -> PyTree:
    """The axes of each matrix within the network, `optax.contrib.MuonDimensionNumbers`; None for other parameters."""

    def axes(path: tuple[Any, ...], x: Array) -> optax.contrib.MuonDimensionNumbers | None:
        names = _names(path)
        if not _is_matrix(names, x) or EMBEDDINGS & names:
            return None
        split = x.ndim - 1 if OUTPUTS & names else 1
        return optax.contrib.MuonDimensionNumbers(tuple(range(split)), tuple(range(split, x.ndim)))

    return jax.tree.map_with_path(axes, params)


def _names(path: tuple[Any, ...]) -> set[str]:
    return set(jax.tree_util.keystr(path, simple=True, separator="/").split("/"))


def _is_matrix(names: set[str], x: Array) -> bool:
    return x.ndim >= 2 and "bias" not in names

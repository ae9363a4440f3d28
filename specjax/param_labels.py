"""Labels of parameters: which of them are matrices, and which of their axes a matrix product contracts.

Labels follow from the names on a parameter's path. A network of your own is labelled correctly if it keeps to these:

- A parameter named `bias` is not a matrix, whatever its rank. Nor is one with fewer than two axes, such as a norm.
- Embeddings, vocabulary heads and heads with one output have one of the names EMBEDDINGS on their path.
- Stacks of matrices, one for each expert, have the name EXPERTS on their path. Their first axis counts the matrices.
- A matrix that multiplies activations, and is no table of embeddings, is named `kernel`.
- Attention's output projection has one of the names OUTPUTS on its path, and contracts all axes but the last. Any other
  kernel contracts its first axis; the axes after it are heads and head width, or the output width.
"""

from typing import Any

import jax
import optax
from jaxtyping import Array

from specjax.types import PyTree

EMBEDDINGS = {"confidence", "embed", "embedding", "head", "lm_head", "predecessor", "successor"}
OUTPUTS = {"o", "out", "o_proj"}
EXPERTS = "experts"


def matrices(params: PyTree) -> PyTree:
    """Return for each parameter whether it is a matrix; embeddings and vocabulary heads are."""
    return jax.tree.map_with_path(lambda path, x: _is_matrix(_names(path), x), params)


def hidden_matrices(params: PyTree) -> PyTree:
    """Return the axes of each hidden matrix as `optax.contrib.MuonDimensionNumbers`; None for all other parameters.

    Embeddings and vocabulary heads are not hidden matrices.
    """

    def axes(path: tuple[Any, ...], x: Array) -> optax.contrib.MuonDimensionNumbers | None:
        names = _names(path)
        if not _is_matrix(names, x) or EMBEDDINGS & names:
            return None
        if EXPERTS in names:
            return optax.contrib.MuonDimensionNumbers((1,), (2,))
        split = _contracted(names, x)
        return optax.contrib.MuonDimensionNumbers(tuple(range(split)), tuple(range(split, x.ndim)))

    return jax.tree.map_with_path(axes, params)


def contracted_axes(params: PyTree) -> PyTree:
    """Return for each parameter named `kernel` how many of its first axes a product contracts; 0 for all others.

    A kernel in 8 bits (specjax.quantization) counts as one parameter.
    """

    def count(path: tuple[Any, ...], x: Any) -> int:
        names = _names(path)
        return _contracted(names, x) if "kernel" in names and _is_matrix(names, x) else 0

    return jax.tree.map_with_path(count, params, is_leaf=lambda x: hasattr(x, "ndim"))


def _contracted(names: set[str], x: Any) -> int:
    return x.ndim - 1 if OUTPUTS & names else 1


def _names(path: tuple[Any, ...]) -> set[str]:
    return set(jax.tree_util.keystr(path, simple=True, separator="/").split("/"))


def _is_matrix(names: set[str], x: Any) -> bool:
    return x.ndim >= 2 and "bias" not in names

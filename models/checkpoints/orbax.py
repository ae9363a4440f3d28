"""Parameters of a draft in our own format: `params/`, an Orbax checkpoint, beside a `config.json`."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from models.files import check_tree, one_line_errors, write_json
from specjax.checkpoint_integrity import check_finite
from specjax.types import PyTree
from specjax.writing import writing


def write_checkpoint(directory: Path, fields: dict[str, Any], params: PyTree) -> None:
    """Write `config.json` with these fields and `params/` into an existing directory."""
    write_json(directory / "config.json", fields)
    path = directory.absolute() / "params"
    with writing(path), ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, params)


def restore_params(directory: Path, expected: PyTree) -> PyTree:
    """Return the parameters that `write_checkpoint` saved, in their dtypes, with the shardings of `expected`.

    Raises a one-line ValueError if there are none, the checkpoint is broken, it has other shapes, or a
    parameter is not finite.
    """
    path = directory.absolute() / "params"
    if not path.is_dir():
        raise ValueError(f"{path}: no such directory")
    check_tree(path)
    with ocp.StandardCheckpointer() as checkpointer, one_line_errors(f"{path}: not a complete Orbax checkpoint"):
        saved = checkpointer.metadata(path).item_metadata.tree
    if _shapes(saved) != _shapes(expected):
        raise ValueError(f"{path}: does not hold the parameters that {directory / 'config.json'} describes")
    with ocp.StandardCheckpointer() as checkpointer, one_line_errors(f"{path}: not a complete Orbax checkpoint"):
        params = checkpointer.restore(path, jax.tree.map(lambda x, y: x.update(dtype=y.dtype), expected, saved))
    check_finite(params, path)
    return params


def _shapes(params: PyTree) -> PyTree:
    return jax.tree.map(lambda x: tuple(x.shape), params)

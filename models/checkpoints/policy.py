"""A policy by itself in our own format: `config.json`, the DecoderConfig, beside `params/`, an Orbax checkpoint."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from models.config import DecoderConfig, LayerConfig
from models.decoder import init_decoder
from models.files import errors_name, new_directory, one_line_errors, read_json, write_json
from models.params import abstract_params
from models.rope import scaling_from_json
from specjax.types import PyTree

Config = TypeVar("Config", bound=LayerConfig)

# Fields that older checkpoints do not have, and mean None.
_LATER = {"sliding_window", "sliding_layers"}


def save_policy_checkpoint(directory: Path, params: PyTree, config: DecoderConfig) -> None:
    """Write the policy, all of it or nothing. Raises ValueError where the directory is in use."""
    with new_directory(directory) as temporary:
        write_checkpoint(temporary, asdict(config), params)


def load_policy_checkpoint(directory: Path, mesh: Mesh) -> tuple[DecoderConfig, PyTree]:
    """The config and the parameters, sharded over the mesh, in the dtypes in which they were saved.

    Raises ValueError with one line for a missing or unknown config field, a broken checkpoint, and where config and
    parameters disagree.
    """
    path = directory / "config.json"
    found = read_json(path)
    with errors_name(path):
        config = config_from_json(DecoderConfig, found, "a policy")
    return config, restore_params(directory, abstract_params(partial(init_decoder, config), mesh))


def write_checkpoint(directory: Path, fields: dict[str, Any], params: PyTree) -> None:
    """Fill an existing directory with `config.json`, of these fields, and `params/`."""
    write_json(directory / "config.json", fields)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory.absolute() / "params", params)


def restore_params(directory: Path, expected: PyTree) -> PyTree:
    """Return the parameters that `write_checkpoint` saved, in their dtypes, with the shardings of `expected`.

    Raises ValueError with one line where there are none, the checkpoint is broken, or it has other shapes.
    """
    path = directory.absolute() / "params"
    if not path.is_dir():
        raise ValueError(f"{path}: no such directory")
    with ocp.StandardCheckpointer() as checkpointer, one_line_errors(f"{path}: not a complete Orbax checkpoint"):
        saved = checkpointer.metadata(path).item_metadata.tree
        if _shapes(saved) == _shapes(expected):
            return checkpointer.restore(path, jax.tree.map(lambda x, y: x.update(dtype=y.dtype), expected, saved))
    raise ValueError(f"{path}: not the parameters that {directory / 'config.json'} describes")


def _shapes(params: PyTree) -> PyTree:
    return jax.tree.map(lambda x: tuple(x.shape), params)


def config_from_json(kind: type[Config], found: Mapping[str, Any], of: str) -> Config:
    """The config whose `dataclasses.asdict` JSON has carried.

    Raises ValueError naming a field that is missing or that `of` does not have.
    """
    expected = {field.name for field in fields(kind)}
    found = {name: None for name in _LATER & expected} | {**found}
    if odd := sorted(found.keys() ^ expected):
        raise ValueError(f"{odd[0]} is {'missing' if odd[0] in expected else f'not a field of {of}'}")
    lists = {name: tuple(value) for name, value in found.items() if isinstance(value, list)}
    return kind(**{**found, **lists, "rope_scaling": scaling_from_json(found["rope_scaling"])})

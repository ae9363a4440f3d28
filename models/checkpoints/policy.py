"""Policy checkpoints in our own format: `config.json`, the DecoderConfig, and `params/`, an Orbax checkpoint."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from models.config import DecoderConfig, ExpertsConfig, LayerConfig
from models.decoder import init_decoder
from models.files import check_tree, errors_name, new_directory, one_line_errors, read_json, write_json
from models.json_fields import nested
from models.params import fitting_params
from models.rope import scaling_from_json
from specjax.checkpoint_integrity import check_finite
from specjax.types import PyTree
from specjax.writing import writing

Config = TypeVar("Config", bound=LayerConfig | ExpertsConfig)

# Fields missing in older checkpoints, where they mean None.
_LATER = {"sliding_window", "sliding_layers", "experts"}


def save_policy_checkpoint(directory: Path, params: PyTree, config: DecoderConfig) -> None:
    """Write a policy, completely or not at all. Raises ValueError if the directory is in use."""
    with new_directory(directory) as temporary:
        write_checkpoint(temporary, asdict(config), params)


def load_policy_checkpoint(directory: Path, mesh: Mesh) -> tuple[DecoderConfig, PyTree]:
    """Load the config and the parameters, which are sharded over the mesh and keep their saved dtypes.

    Raises a one-line ValueError for a missing or unknown config field, a broken checkpoint, or if config and
    parameters disagree.
    """
    config = read_policy_config(directory)
    return config, restore_params(directory, fitting_params(partial(init_decoder, config), mesh))


def read_policy_config(directory: Path) -> DecoderConfig:
    """Read the config alone. Raises a one-line ValueError for a missing or unknown field."""
    path = directory / "config.json"
    found = read_json(path)
    with errors_name(path):
        return config_from_json(DecoderConfig, found, "a policy")


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


def config_from_json(kind: type[Config], found: Mapping[str, Any], of: str) -> Config:
    """Return the config saved as JSON of its `dataclasses.asdict`.

    Raises ValueError naming a field that is missing, or unknown. `of` says in the message what lacks it, "a policy".
    """
    expected = {field.name for field in fields(kind)}
    values: dict[str, Any] = {**dict.fromkeys(_LATER & expected), **found}
    if odd := sorted(values.keys() ^ expected):
        raise ValueError(f"{odd[0]} is {'missing' if odd[0] in expected else f'not a field of {of}'}")
    values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    if "rope_scaling" in values:
        values["rope_scaling"] = scaling_from_json(values["rope_scaling"])
    if values.get("experts") is not None:
        values["experts"] = config_from_json(ExpertsConfig, nested(values, "experts"), "experts")
    return kind(**values)

"""A policy by itself in our own format: `config.json`, the DecoderConfig, beside `params/`, an Orbax checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from models.config import DecoderConfig, Llama3Scaling
from models.decoder import init_decoder
from models.files import new_directory, read_json, write_json
from models.params import abstract_params
from specjax.types import PyTree


def save_policy_checkpoint(directory: Path, params: PyTree, config: DecoderConfig) -> None:
    """Write the policy, all of it or nothing. Raises ValueError where the directory is in use."""
    with new_directory(directory) as temporary:
        write_json(temporary / "config.json", asdict(config))
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(temporary.absolute() / "params", params)


def load_policy_checkpoint(directory: Path, mesh: Mesh) -> tuple[DecoderConfig, PyTree]:
    """The config and the parameters, sharded over the mesh, in the dtypes in which they were saved.

    Raises ValueError with one line for a missing or unknown config field, a broken checkpoint, and where config and
    parameters disagree.
    """
    config = _read_config(directory / "config.json")
    path = directory.absolute() / "params"
    if not path.is_dir():
        raise ValueError(f"{path}: no such directory")
    expected = abstract_params(partial(init_decoder, config), mesh)
    with ocp.StandardCheckpointer() as checkpointer, _one_line_errors(path):
        saved = checkpointer.metadata(path).item_metadata.tree
        if _shapes(saved) == _shapes(expected):
            targets = jax.tree.map(lambda x, y: x.update(dtype=y.dtype), expected, saved)
            return config, checkpointer.restore(path, targets)
    raise ValueError(f"{path}: not the parameters that {directory / 'config.json'} describes")


def _shapes(params: PyTree) -> PyTree:
    return jax.tree.map(lambda x: tuple(x.shape), params)


@contextmanager
def _one_line_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # orbax raises a different kind, some of many lines, for each way to be broken
        reason = (str(error) or type(error).__name__).splitlines()[0][:120]
        raise ValueError(f"{path}: not a complete Orbax checkpoint ({reason})") from error


def _read_config(path: Path) -> DecoderConfig:
    found: dict[str, Any] = read_json(path)
    expected = {field.name for field in fields(DecoderConfig)}
    if odd := sorted(found.keys() ^ expected):
        raise ValueError(f"{path}: {odd[0]} is {'missing' if odd[0] in expected else 'not a field of a policy'}")
    scaling = found["rope_scaling"]
    found["rope_scaling"] = None if scaling is None else Llama3Scaling(**scaling)
    found["feature_layers"] = tuple(found["feature_layers"])
    return DecoderConfig(**found)

"""A draft by itself in our own format: `config.json` beside `params/`, an Orbax checkpoint.

`config.json` says which kind of draft it is, its shape, and which layers of the policy it reads. The ids that a reduced
vocabulary stands for are in `target_ids.npy`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from models.eagle3 import Eagle3Config, init_eagle3
from models.files import errors_name, json_text, new_directory, read_json, write_atomically, write_json
from models.params import abstract_params
from models.policy_checkpoint import config_from_json, restore_params
from specjax.types import PyTree

_IDS = "target_ids.npy"
_FIELDS, _MADE_FOR = {"kind", "head", "feature_layers"}, "made_for"


class SavedDraft(NamedTuple):
    """A draft as a checkpoint holds it.

    target_ids:     int32 [Vd], the policy's id of each token of the draft's vocabulary, ascending; None for all of V.
    feature_layers: of the policy, on whose entry the draft reads; empty where the checkpoint does not say.
    """

    config: Eagle3Config
    params: PyTree
    target_ids: np.ndarray | None
    feature_layers: tuple[int, ...]


@dataclass(frozen=True)
class MadeFor:
    """What a draft was made for and what it was worth there, against which a run can hold it: no shape tells.

    policy:               the directory of the policy, or of the run that has it.
    hidden_size:          of the policy. num_layers: of the policy.
    temperature:          that of the law under which the acceptance holds.
    predicted_acceptance: the mean of sum_v min(p, q) on held-out prompts; None where it is not known.
    """

    policy: str | None
    hidden_size: int
    num_layers: int
    temperature: float
    predicted_acceptance: float | None


def save_draft_checkpoint(
    directory: Path,
    params: PyTree,
    config: Eagle3Config,
    target_ids: np.ndarray | None,
    feature_layers: tuple[int, ...],
) -> None:
    """Write the draft, all of it or nothing; the arguments as `SavedDraft` has them.

    Raises ValueError where the directory is in use, or ids and config disagree.
    """
    check_target_ids(target_ids, config)
    with new_directory(directory) as temporary:
        described = {"kind": "eagle3", "head": asdict(config), "feature_layers": feature_layers}
        write_json(temporary / "config.json", described)
        if target_ids is not None:
            np.save(temporary / _IDS, target_ids.astype(np.int32))
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(temporary.absolute() / "params", params)


def load_draft_checkpoint(directory: Path, mesh: Mesh) -> SavedDraft:
    """The draft, its parameters sharded over the mesh, in the dtypes in which they were saved.

    Raises ValueError with one line for a missing or unknown config field, a broken checkpoint, and where config, ids
    and parameters disagree.
    """
    path = directory / "config.json"
    found = read_json(path)
    with errors_name(path):
        if found.get("kind") != "eagle3":
            raise ValueError(f"kind = {found.get('kind')}: must be eagle3")
        if found.keys() - {_MADE_FOR} != _FIELDS:
            raise ValueError("must have kind, head and feature_layers, and beside them made_for alone")
        _made_for(found)
        config = config_from_json(Eagle3Config, found["head"], "a draft")
    ids = _read_ids(directory / _IDS)
    with errors_name(directory):
        check_target_ids(ids, config)
    params = restore_params(directory / "params", abstract_params(partial(init_eagle3, config), mesh), path)
    return SavedDraft(config, params, ids, tuple(found["feature_layers"]))


def state_made_for(directory: Path, made_for: MadeFor) -> None:
    """Add to a saved draft what it was made for: its acceptance is measured once it is safe."""
    path = directory / "config.json"
    write_atomically(path, json_text(read_json(path) | {_MADE_FOR: asdict(made_for)}))


def read_made_for(directory: Path) -> MadeFor | None:
    """What the draft in a directory of any format says that it was made for. Raises ValueError where that is none."""
    path = directory / "config.json"
    found = read_json(path)
    with errors_name(path):
        return _made_for(found)


def _made_for(found: Mapping[str, Any]) -> MadeFor | None:
    stated = found.get(_MADE_FOR)
    if stated is None:
        return None
    names = [field.name for field in fields(MadeFor)]
    if not isinstance(stated, dict) or stated.keys() != set(names):
        raise ValueError(f"{_MADE_FOR}: must have {', '.join(names)} and nothing else")
    for name in ("temperature", "predicted_acceptance"):
        if not isinstance(stated[name], int | float | None):
            raise ValueError(f"{_MADE_FOR}.{name} = {stated[name]}: must be a number")
    return MadeFor(**stated)


def check_target_ids(ids: np.ndarray | None, config: Eagle3Config) -> None:
    """Raises ValueError unless these are the ids of a draft vocabulary of the config's size, within the policy's."""
    size, policy = config.draft_vocab_size, config.vocab_size
    if ids is None:
        if size != policy:
            raise ValueError(f"target_ids = None: a draft vocabulary of {size} tokens of {policy} needs them")
        return
    if ids.shape != (size,):
        raise ValueError(f"target_ids: of shape {ids.shape}, must be ({size},), the draft vocabulary's")
    if np.any(np.diff(ids) <= 0):
        raise ValueError("target_ids: must be strictly increasing")
    if ids[0] < 0 or ids[-1] >= policy:
        raise ValueError(f"target_ids: {ids[0]} .. {ids[-1]}, must be within the policy's 0 .. {policy - 1}")


def _read_ids(path: Path) -> np.ndarray | None:
    if not path.exists():
        return None
    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not an array of ids ({error})") from error

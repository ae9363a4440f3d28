"""Draft checkpoints in our own format: `config.json` and `params/`, an Orbax checkpoint.

`config.json` holds the kind of draft, its shape, and the layers of the policy that it reads. `target_ids.npy` holds the
policy's token ids of a reduced vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from models.checkpoints.orbax import restore_params, write_checkpoint
from models.drafts.block import BlockConfig, init_block
from models.drafts.eagle3 import Eagle3Config, init_eagle3
from models.drafts.shape import FeatureDraftConfig
from models.files import check_file, errors_name, new_directory, one_line_errors, read_json
from models.json_fields import layer_ids, nested
from models.params import fitting_params
from models.rope import scaling_from_json
from specjax.options import show
from specjax.parallel import processes
from specjax.types import PyTree

_IDS = "target_ids.npy"
_FIELDS = {"kind", "head", "feature_layers"}
_KINDS = {"eagle3": Eagle3Config, "block": BlockConfig}
_INITS: dict[type[FeatureDraftConfig], Callable[..., PyTree]] = {Eagle3Config: init_eagle3, BlockConfig: init_block}
Shape = TypeVar("Shape", bound=FeatureDraftConfig)


class SavedDraft(NamedTuple):
    """Contents of a draft checkpoint.

    Attributes:
        config: Shape of the draft.
        params: Parameters of the draft.
        target_ids: int32 [Vd], the policy's id of each token of the draft's vocabulary, ascending; None for all of V.
        feature_layers: Layers of the policy on whose entry the draft reads; empty if the checkpoint does not say.
    """

    config: Any
    params: PyTree
    target_ids: np.ndarray | None
    feature_layers: tuple[int, ...]


def save_draft_checkpoint(
    directory: Path,
    params: PyTree,
    config: FeatureDraftConfig,
    target_ids: np.ndarray | None,
    feature_layers: tuple[int, ...],
) -> None:
    """Write a draft, completely or not at all. See `SavedDraft` for the arguments.

    Raises ValueError if the directory is in use, or ids and config disagree.
    """
    check_target_ids(target_ids, config)
    with new_directory(directory) as temporary:
        kind = next(kind for kind, shape in _KINDS.items() if isinstance(config, shape))
        described = {"kind": kind, "head": asdict(config), "feature_layers": feature_layers}
        write_checkpoint(temporary, described, params)
        if target_ids is not None and processes.primary():
            np.save(temporary / _IDS, target_ids.astype(np.int32))


def load_draft_checkpoint(directory: Path, mesh: Mesh) -> SavedDraft:
    """Load a draft. Its parameters are sharded over the mesh and keep the dtypes in which they were saved.

    Raises a one-line ValueError for a missing or unknown config field, a broken checkpoint, or if config, ids and
    parameters disagree.
    """
    config, layers = read_draft_config(directory)
    ids = _read_ids(directory / _IDS)
    with errors_name(directory):
        check_target_ids(ids, config)
    params = restore_params(directory, fitting_params(init_of(config), mesh))
    return SavedDraft(config, params, ids, layers)


def init_of(config: FeatureDraftConfig) -> Callable[[jax.Array], PyTree]:
    """Return the function key -> random parameters of a draft of this shape."""
    return partial(_INITS[type(config)], config)


def read_draft_config(directory: Path) -> tuple[FeatureDraftConfig, tuple[int, ...]]:
    """Return the draft's config and feature layers. Raises a one-line ValueError for a missing or unknown field."""
    path = directory / "config.json"
    values = read_json(path)
    with errors_name(path):
        if (shape := _KINDS.get(str(values.get("kind")))) is None:
            raise ValueError(f"kind = {show(values.get('kind'))}: must be {' or '.join(_KINDS)}")
        if values.keys() != _FIELDS:
            raise ValueError("must have the fields kind, head and feature_layers, and no others")
        return head_from_json(nested(values, "head"), shape), layer_ids(values, "feature_layers")


def head_from_json(head: Mapping[str, Any], shape: type[Shape]) -> Shape:
    """Return the config of a draft that was saved as JSON. Raises ValueError naming a missing or unknown field."""
    expected = {field.name for field in fields(shape)}
    values: dict[str, Any] = {"sliding_window": None, **head}  # missing in older checkpoints
    if odd := sorted(values.keys() ^ expected):
        raise ValueError(f"{odd[0]} is {'missing' if odd[0] in expected else 'not a field of a draft'}")
    values["rope_scaling"] = scaling_from_json(values["rope_scaling"])
    if isinstance(layers := values.get("sliding_layers"), list):
        values["sliding_layers"] = tuple(layers)
    return shape(**values)


def save_named_draft(directory: Path, kind: str, params: PyTree) -> None:
    """Write the parameters of a draft whose builder is `kind`, as package.module:name.

    Raises ValueError if the directory is in use.
    """
    with new_directory(directory) as temporary:
        write_checkpoint(temporary, {"kind": kind}, params)


def load_named_draft(directory: Path, kind: str, like: PyTree) -> PyTree:
    """Return the parameters that `save_named_draft` wrote, with the shapes, dtypes and shardings of `like`.

    Raises ValueError if the draft is of another kind, or its parameters have other shapes.
    """
    path = directory / "config.json"
    values = read_json(path)
    with errors_name(path):
        if values.get("kind") != kind:
            raise ValueError(f"kind = {show(values.get('kind'))}: must be {kind}")
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
    params = restore_params(directory, abstract)
    return jax.tree.map(lambda x, y: x.astype(y.dtype), params, like)


def check_target_ids(ids: np.ndarray | None, config: FeatureDraftConfig) -> None:
    """Raise ValueError unless these are `draft_vocab_size` ascending ids within the policy's vocabulary."""
    size, policy = config.draft_vocab_size, config.vocab_size
    if ids is None:
        if size != policy:
            raise ValueError(f"target_ids = None: must be set for a draft vocabulary of {size} out of {policy} tokens")
        return
    if ids.shape != (size,) or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"target_ids: is {ids.dtype} {ids.shape}; must be integers ({size},), the size of the draft vocabulary"
        )
    if np.any(np.diff(ids) <= 0):
        raise ValueError("target_ids: must be strictly increasing")
    if ids[0] < 0 or ids[-1] >= policy:
        raise ValueError(
            f"target_ids: range from {ids[0]} to {ids[-1]}; must be within 0 .. {policy - 1}, the policy's vocabulary"
        )


def _read_ids(path: Path) -> np.ndarray | None:
    if not path.exists():
        return None
    check_file(path)
    with one_line_errors(f"{path}: not an array of ids"):
        # Mapped: a header that states more than the file holds is refused, before anything of that size is made.
        return np.array(np.load(path, mmap_mode="r", allow_pickle=False))

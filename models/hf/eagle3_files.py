"""Import and export of EAGLE-3 heads in the layouts of SafeAILab, SpecForge and speculators.

The head's own `config.json` determines the layers that it reads, its rotary embedding and its maximal length, never the
policy's. The files may hold a copy of the policy's embedding. No parameter is made from it.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from models.checkpoints.draft import SavedDraft, check_target_ids
from models.config import DecoderConfig, Dtype
from models.drafts.eagle3 import Eagle3Config, init_eagle3
from models.files import CARRIED_TENSORS, errors_name, new_directory, optional, read_json, write_json
from models.hf.eagle3_dialects import Dialect, config_from_public, config_to_public, dialect_of, stating_dtype
from models.hf.eagle3_layout import EMBEDDING, eagle3_tensors
from models.hf.load import DTYPES, INDEX, SINGLE, check_names, file_views, open_tensors, read_tensors, row_slices
from models.hf.torch_files import torch_views
from models.hf.vocabulary_maps import TO_DRAFT, TO_TARGET, changed_maps, read_target_ids
from models.params import by_path, fitting_params
from specjax.parallel import processes

TORCH = "pytorch_model.bin"
_DTYPES = {**DTYPES, "F16": np.dtype("float16")}
# Least mean cosine between a copied embedding's rows and the policy's. RL moves rows far less; unrelated ones are at 0.
_LEAST_COSINE = 0.9


def load_eagle3(directory: Path, mesh: Mesh, param_dtype: Dtype | None = None) -> SavedDraft:
    """Load the head in a directory of either dialect, sharded over the mesh.

    Reads safetensors, or `pytorch_model.bin` if torch is installed. By default every tensor keeps its dtype.

    Raises a one-line ValueError naming the field or tensor: for a config that is not implemented, a missing, unexpected
    or mis-shaped tensor, or an invalid vocabulary map. Raises ImportError without safetensors.
    """
    (config, layers), dialect = read_eagle3_config(directory), dialect_of(read_json(directory / "config.json"))
    assert dialect is not None
    views, tensors = _open(directory), eagle3_tensors(config, dialect)
    vocabulary = {name: views.pop(name)[:] for name in (TO_TARGET, TO_DRAFT) if name in views}
    views.pop(EMBEDDING, None)
    check_names(directory, views, tensors)
    with errors_name(directory):
        ids = read_target_ids(vocabulary, config)
    targets = fitting_params(partial(init_eagle3, config), mesh)
    params = read_tensors(directory, views, tensors, targets, param_dtype, _DTYPES)
    return SavedDraft(config, params, ids, layers)


def read_eagle3_config(directory: Path) -> tuple[Eagle3Config, tuple[int, ...]]:
    """Return the head's config and feature layers. Raises a one-line ValueError that names the field."""
    path = directory / "config.json"
    with errors_name(path):
        return config_from_public(read_json(path))


def save_eagle3(
    directory: Path,
    draft: SavedDraft,
    dialect: Dialect,
    source: Mapping[str, Any] | None = None,
    carried: Mapping[str, np.ndarray] | None = None,
    verifier: str | None = None,
    policy: DecoderConfig | None = None,
) -> None:
    """Write a head in the layout that vLLM and SGLang load, completely or not at all.

    Every tensor keeps its bits and its dtype.

    Args:
        directory: directory to write; must not exist, or be empty.
        draft: head to write.
        dialect: dialect to write.
        source: the head's original `config.json`. It is written unchanged if it has this dialect and still describes
            the head.
        carried: the head's original tensors that are not parameters, from `carried_tensors`. Vocabulary maps are
            replaced if they no longer describe the head's vocabulary. None for a head that was made here.
        verifier: the policy's name or path, which only speculators' files state.
        policy: the policy's shape, whose architecture speculators' files state; None if unknown.

    Raises ValueError if the directory is in use, or the dialect cannot describe the head. Raises ImportError without
    safetensors.
    """
    save_file = optional("safetensors.numpy").save_file
    flat = by_path(draft.params)
    config = draft.config
    check_target_ids(draft.target_ids, config)
    tensors = {
        name: stored.pack(processes.fetch(flat[stored.path]))
        for name, stored in eagle3_tensors(config, dialect).items()
    }
    carried = carried or {}
    tensors |= {**carried, **changed_maps(draft.target_ids, config, carried)}
    with new_directory(directory) as temporary:
        if source is not None and dialect_of(source) == dialect and _describes(source, draft):
            write_json(temporary / "config.json", dict(source))
        else:
            fields = config_to_public(config, draft.feature_layers, dialect, verifier, policy)
            write_json(temporary / "config.json", stating_dtype(fields, flat["head", "kernel"].dtype.name))
        if processes.primary():
            save_file(tensors, temporary / SINGLE, metadata={"format": "pt"})


def carried_tensors(directory: Path, param_dtype: Dtype | None = None) -> dict[str, np.ndarray] | None:
    """Read a head's original tensors that are not parameters: vocabulary maps, a copy of the policy's embedding.

    They come from a public directory, or from the file that `write_carried` wrote into one of ours. None for a head
    that was made here. The maps keep their dtype, and by default so does the embedding.
    """
    if _is_ours(directory) and not (directory / CARRIED_TENSORS).exists():
        return None
    views = _open(directory)
    tensors = {name: views[name][:] for name in (TO_TARGET, TO_DRAFT, EMBEDDING) if name in views}
    if param_dtype is not None and EMBEDDING in tensors:
        tensors[EMBEDDING] = tensors[EMBEDDING].astype(param_dtype)
    return tensors


def write_carried(directory: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write the tensors of `carried_tensors` into a directory in our format, for a later export."""
    if processes.primary():
        optional("safetensors.numpy").save_file(dict(tensors), directory / CARRIED_TENSORS)


def check_embedding(directory: Path, table: jax.Array) -> None:
    """Raise ValueError if the head's files hold a copy of another policy's embedding than `table` [V, D].

    A policy trained since then passes: its rows have nearly kept their directions.
    """
    copy = _open(directory).get(EMBEDDING)
    if copy is None:
        return
    same_shape = tuple(copy.get_shape()) == table.shape
    if not (same_shape and _mean_cosine(copy, table) >= _LEAST_COSINE):
        raise ValueError(f"{EMBEDDING}: differs from the policy's, so the head was made for another policy")


def _mean_cosine(copy: Any, table: jax.Array) -> float:
    """Return the mean cosine between rows of a view and an array, both [V, D]. Two rows of zeros count as equal."""
    total = 0.0
    for rows in row_slices(len(table)):
        ours, theirs = (np.array(processes.fetch(x[rows]), np.float32) for x in (table, copy))
        norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
        cosines = np.sum(ours * theirs, axis=1) / np.where(norms > 0, norms, 1)
        total += float(np.sum(np.where(ours.any(axis=1) | theirs.any(axis=1), cosines, 1)))
    return total / len(table)


def _describes(source: Mapping[str, Any], draft: SavedDraft) -> bool:
    """Return whether a `config.json` describes this head, dtypes aside."""
    config, layers = config_from_public(source)
    config = replace(config, dtype=draft.config.dtype, param_dtype=draft.config.param_dtype)
    return (config, layers) == (draft.config, draft.feature_layers)


def _is_ours(directory: Path) -> bool:
    return (directory / "params").is_dir()


def _open(directory: Path) -> dict[str, Any]:
    """Return lazy views by name: all tensors of a public directory, or the carried ones of a directory of ours."""
    if _is_ours(directory):
        carried = directory / CARRIED_TENSORS
        return file_views(carried) if carried.exists() else {}
    if (directory / TORCH).exists() and not any((directory / name).exists() for name in (SINGLE, INDEX)):
        return torch_views(directory / TORCH, _DTYPES)
    return open_tensors(directory)

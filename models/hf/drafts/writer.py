"""Writer of EAGLE-3 heads and block drafts in public dialects."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from models.checkpoints.draft import SavedDraft, check_target_ids
from models.drafts.block import BlockConfig
from models.drafts.eagle3 import Eagle3Config
from models.files import new_directory, optional, write_json
from models.hf.drafts.block import block_to_public
from models.hf.drafts.carried import copied_tables
from models.hf.drafts.dialects import Dialect, dialect_of
from models.hf.drafts.eagle3 import eagle3_to_public
from models.hf.drafts.reader import draft_from_public
from models.hf.drafts.stated_policy import StatedPolicy
from models.hf.drafts.tensors import draft_tensors
from models.hf.drafts.vocabulary import changed_maps
from models.hf.load import SINGLE
from models.params import by_path
from specjax.parallel import processes

UNKNOWN = StatedPolicy()


def draft_to_public(
    config: Eagle3Config | BlockConfig, layers: tuple[int, ...], dialect: Dialect, policy: StatedPolicy = UNKNOWN
) -> dict[str, Any]:
    """Return the fields of a `config.json` in this dialect. Raises ValueError if it cannot describe the draft.

    Args:
        config: shape of the draft.
        layers: layers that the draft reads, as `draft_from_public` returns them.
        dialect: dialect to write.
        policy: what the files state of the policy.
    """
    if isinstance(config, BlockConfig):
        return block_to_public(config, layers, dialect, policy)
    return eagle3_to_public(config, layers, dialect, policy)


def stating_dtype(fields: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return a `config.json` with every dtype field, also in nested objects, set to this dtype."""
    nested = {name: stating_dtype(value, dtype) if isinstance(value, dict) else value for name, value in fields.items()}
    return {name: dtype if name in ("dtype", "torch_dtype") else value for name, value in nested.items()}


def save_public_draft(
    directory: Path,
    draft: SavedDraft,
    dialect: Dialect,
    policy: StatedPolicy = UNKNOWN,
    source: Mapping[str, Any] | None = None,
    carried: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Write a draft in the layout that engines load, completely or not at all. Every tensor keeps its bits and dtype.

    Args:
        directory: directory to write; must not exist, or be empty.
        draft: draft to write.
        dialect: dialect to write.
        policy: what the files state of the policy.
        source: the draft's original `config.json`. It is written unchanged if it has this dialect and still describes
            the draft.
        carried: tensors beside the parameters, from `carried_tensors` or `copies`. Vocabulary maps are replaced if they
            no longer describe the draft's vocabulary. A block draft's copies of the policy's tables are written for
            deepspec, which needs them, and for a source of this dialect.

    Raises ValueError if the directory is in use, or the dialect cannot describe the draft, and ImportError without
    safetensors.
    """
    save_file = optional("safetensors.numpy").save_file
    flat, config, carried = by_path(draft.params), draft.config, carried or {}
    check_target_ids(draft.target_ids, config)
    is_block = isinstance(config, BlockConfig)
    same_dialect = source is not None and dialect_of(source) == dialect
    if source is not None and same_dialect and _describes(source, draft):
        fields = dict(source)
    else:
        fields = draft_to_public(config, draft.feature_layers, dialect, policy)
        fields = stating_dtype(fields, flat["fc" if is_block else "head", "kernel"].dtype.name)
    needed = copied_tables(config) if dialect == "deepspec" else ()
    if missing := [name for name in needed if name not in carried]:
        raise ValueError(
            f"{missing[0]}: missing; deepspec's layout holds the policy's, which launch.export and launch.distill write"
        )
    if is_block and not same_dialect:
        carried = {name: carried[name] for name in needed}
    tensors = {
        name: stored.pack(processes.fetch(flat[stored.path])) for name, stored in draft_tensors(config, dialect).items()
    }
    maps = changed_maps(draft.target_ids, config, carried) if config.own_head else {}
    with new_directory(directory) as temporary:
        write_json(temporary / "config.json", fields)
        if processes.primary():
            save_file({**tensors, **carried, **maps}, temporary / SINGLE, metadata={"format": "pt"})


def _describes(fields: Mapping[str, Any], draft: SavedDraft) -> bool:
    """Return whether the fields are of a draft of the same shape and layers, dtypes aside."""
    config, layers = draft_from_public(fields)
    config = replace(config, dtype=draft.config.dtype, param_dtype=draft.config.param_dtype)
    return (config, layers) == (draft.config, draft.feature_layers)

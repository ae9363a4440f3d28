"""Import and export of block drafts in the layouts of z-lab (DFlash), speculators and DeepSpec.

Files of DeepSpec, and older ones of speculators, hold copies of the policy's embedding and vocabulary head. No
parameter is made from them.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from models.checkpoints.draft import SavedDraft, check_target_ids
from models.config import Dtype
from models.drafts.block import BlockConfig, init_block
from models.files import errors_name, new_directory, optional, read_json, write_json
from models.hf.block_dialects import StatedPolicy, block_dialect_of, block_from_public, block_to_public
from models.hf.block_layout import block_draft_tensors
from models.hf.carried import DRAFT_DTYPES, copied_tables, describes, open_draft
from models.hf.eagle3_dialects import Dialect, stating_dtype
from models.hf.load import SINGLE, check_names, read_tensors
from models.hf.vocabulary_maps import TO_DRAFT, TO_TARGET, changed_maps, read_target_ids
from models.params import by_path, fitting_params
from specjax.parallel import processes


def read_block_config(directory: Path) -> tuple[BlockConfig, tuple[int, ...]]:
    """Return the draft's config and feature layers. Raises a one-line ValueError that names the field."""
    path = directory / "config.json"
    with errors_name(path):
        return block_from_public(read_json(path))


def load_block(directory: Path, mesh: Mesh, param_dtype: Dtype | None = None) -> SavedDraft:
    """Load the block draft in a directory of any dialect, sharded over the mesh. Needs safetensors.

    By default every tensor keeps its dtype. Copies of the policy's embedding and vocabulary head are not read.

    Raises a one-line ValueError naming the field or tensor: for a config that is not implemented, a missing, unexpected
    or mis-shaped tensor, or an invalid vocabulary map.
    """
    config, layers = read_block_config(directory)
    views, tensors = open_draft(directory), block_draft_tensors(config)
    vocabulary = {name: views.pop(name)[:] for name in (TO_TARGET, TO_DRAFT) if name in views}
    for name in copied_tables(config):
        views.pop(name, None)
    check_names(directory, views, tensors)
    with errors_name(directory):
        ids = read_target_ids(vocabulary, config)
    targets = fitting_params(partial(init_block, config), mesh)
    return SavedDraft(config, read_tensors(directory, views, tensors, targets, param_dtype, DRAFT_DTYPES), ids, layers)


def save_block(
    directory: Path,
    draft: SavedDraft,
    dialect: Dialect,
    policy: StatedPolicy,
    source: Mapping[str, Any] | None = None,
    carried: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Write a block draft in this dialect, completely or not at all. Every tensor keeps its bits and its dtype.

    Args:
        directory: directory to write; must not exist, or be empty.
        draft: draft to write.
        dialect: dialect to write.
        policy: what the files state of the policy.
        source: the draft's original `config.json`. It is written unchanged if it has this dialect and still describes
            the draft.
        carried: tensors beside the parameters, from `carried_tensors` or `copies`. Vocabulary maps are replaced if they
            no longer describe the draft's vocabulary. Copies of the policy's tables are written for deepspec, which
            needs them, and for a source of this dialect.

    Raises ValueError if the directory is in use, or the dialect cannot describe the draft, and ImportError without
    safetensors.
    """
    save_file = optional("safetensors.numpy").save_file
    flat, config, carried = by_path(draft.params), draft.config, carried or {}
    check_target_ids(draft.target_ids, config)
    same_dialect = source is not None and block_dialect_of(source) == dialect
    if source is not None and same_dialect and describes(block_from_public(source), draft):
        fields = dict(source)
    else:
        fields = block_to_public(config, draft.feature_layers, dialect, policy)
        fields = stating_dtype(fields, flat["fc", "kernel"].dtype.name)
    needed = copied_tables(config) if dialect == "deepspec" else ()
    if missing := [name for name in needed if name not in carried]:
        raise ValueError(
            f"{missing[0]}: missing; deepspec's layout holds the policy's, which launch.export and launch.distill write"
        )
    if not same_dialect:
        carried = {name: carried[name] for name in needed}
    tensors = {
        name: stored.pack(processes.fetch(flat[stored.path])) for name, stored in block_draft_tensors(config).items()
    }
    tensors |= carried
    if config.own_head:
        tensors |= changed_maps(draft.target_ids, config, carried)
    with new_directory(directory) as temporary:
        write_json(temporary / "config.json", fields)
        if processes.primary():
            save_file(tensors, temporary / SINGLE, metadata={"format": "pt"})

"""Import and export of EAGLE-3 heads in the layouts of SafeAILab, SpecForge and speculators.

The head's own `config.json` determines the layers that it reads, its rotary embedding and its maximal length, never the
policy's. The files may hold a copy of the policy's embedding. No parameter is made from it.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from models.checkpoints.draft import SavedDraft, check_target_ids
from models.config import DecoderConfig, Dtype
from models.drafts.eagle3 import Eagle3Config, init_eagle3
from models.files import errors_name, new_directory, optional, read_json, write_json
from models.hf.carried import DRAFT_DTYPES, EMBEDDING, describes, open_draft
from models.hf.eagle3_dialects import Dialect, config_from_public, config_to_public, dialect_of, stating_dtype
from models.hf.eagle3_layout import eagle3_tensors
from models.hf.load import SINGLE, check_names, read_tensors
from models.hf.vocabulary_maps import TO_DRAFT, TO_TARGET, changed_maps, read_target_ids
from models.params import by_path, fitting_params
from specjax.parallel import processes


def load_eagle3(directory: Path, mesh: Mesh, param_dtype: Dtype | None = None) -> SavedDraft:
    """Load the head in a directory of either dialect, sharded over the mesh.

    Reads safetensors, or `pytorch_model.bin` if torch is installed. By default every tensor keeps its dtype.

    Raises a one-line ValueError naming the field or tensor: for a config that is not implemented, a missing, unexpected
    or mis-shaped tensor, or an invalid vocabulary map. Raises ImportError without safetensors.
    """
    (config, layers), dialect = read_eagle3_config(directory), dialect_of(read_json(directory / "config.json"))
    assert dialect is not None
    views, tensors = open_draft(directory), eagle3_tensors(config, dialect)
    vocabulary = {name: views.pop(name)[:] for name in (TO_TARGET, TO_DRAFT) if name in views}
    views.pop(EMBEDDING, None)
    check_names(directory, views, tensors)
    with errors_name(directory):
        ids = read_target_ids(vocabulary, config)
    targets = fitting_params(partial(init_eagle3, config), mesh)
    params = read_tensors(directory, views, tensors, targets, param_dtype, DRAFT_DTYPES)
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
        if source is not None and dialect_of(source) == dialect and describes(config_from_public(source), draft):
            write_json(temporary / "config.json", dict(source))
        else:
            fields = config_to_public(config, draft.feature_layers, dialect, verifier, policy)
            write_json(temporary / "config.json", stating_dtype(fields, flat["head", "kernel"].dtype.name))
        if processes.primary():
            save_file(tensors, temporary / SINGLE, metadata={"format": "pt"})

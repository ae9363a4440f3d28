"""Block drafts in the layouts of z-lab (DFlash), speculators and DeepSpec: import of all, export of the first two."""

from functools import partial
from pathlib import Path

from jax.sharding import Mesh

from models.checkpoints.draft import SavedDraft, check_target_ids
from models.config import DecoderConfig, Dtype
from models.drafts.block import BlockConfig, init_block
from models.files import errors_name, new_directory, optional, read_json, write_json
from models.hf.block_dialects import block_from_public, block_to_public
from models.hf.block_layout import block_draft_tensors
from models.hf.eagle3_dialects import Dialect
from models.hf.eagle3_layout import EMBEDDING
from models.hf.layout import HEAD
from models.hf.load import SINGLE, check_names, open_tensors, read_tensors
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
    views, tensors = open_tensors(directory), block_draft_tensors(config)
    vocabulary = {name: views.pop(name)[:] for name in (TO_TARGET, TO_DRAFT) if name in views}
    for name in (EMBEDDING,) if config.own_head else (EMBEDDING, HEAD):
        views.pop(name, None)
    check_names(directory, views, tensors)
    with errors_name(directory):
        ids = read_target_ids(vocabulary, config)
    targets = fitting_params(partial(init_block, config), mesh)
    return SavedDraft(config, read_tensors(directory, views, tensors, targets, param_dtype), ids, layers)


def save_block(
    directory: Path, draft: SavedDraft, dialect: Dialect, policy: DecoderConfig, verifier: str | None = None
) -> None:
    """Write a block draft in this dialect, completely or not at all. Every tensor keeps its bits and its dtype.

    verifier: name or path of the policy, which only speculators' files state.

    Raises ValueError if the directory is in use, or the dialect cannot describe the draft, and ImportError without
    safetensors.
    """
    save_file = optional("safetensors.numpy").save_file
    flat, config = by_path(draft.params), draft.config
    check_target_ids(draft.target_ids, config)
    fields = block_to_public(config, draft.feature_layers, dialect, policy, verifier)
    tensors = {
        name: stored.pack(processes.fetch(flat[stored.path])) for name, stored in block_draft_tensors(config).items()
    }
    if config.own_head:
        tensors |= changed_maps(draft.target_ids, config, {})
    with new_directory(directory) as temporary:
        write_json(temporary / "config.json", fields)
        if processes.primary():
            save_file(tensors, temporary / SINGLE, metadata={"format": "pt"})

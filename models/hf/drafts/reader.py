"""Reader of EAGLE-3 heads and block drafts in public dialects.

The draft's own `config.json` determines the layers that it reads, its rotary embedding and its maximal length, never
the policy's. The files may hold copies of the policy's embedding and vocabulary head. No parameter is made from them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from models.checkpoints.draft import SavedDraft, init_of
from models.config import Dtype
from models.drafts.block import BlockConfig
from models.drafts.eagle3 import Eagle3Config
from models.files import errors_name, read_json
from models.hf.drafts.block import block_from_public
from models.hf.drafts.carried import DRAFT_DTYPES, copied_tables, open_draft
from models.hf.drafts.dialects import dialect_of
from models.hf.drafts.eagle3 import eagle3_from_public
from models.hf.drafts.tensors import draft_tensors
from models.hf.drafts.vocabulary import TO_DRAFT, TO_TARGET, read_target_ids
from models.hf.load import check_names, read_tensors
from models.json_fields import check
from models.params import fitting_params


def draft_from_public(fields: Mapping[str, Any]) -> tuple[Eagle3Config | BlockConfig, tuple[int, ...]]:
    """Return the draft that a `config.json` of any dialect describes, and the policy's layers that it reads on entry.

    Raises a one-line ValueError with the field, its value and what is allowed: for a missing field, a value that is not
    implemented, or an unknown field.
    """
    name = dialect_of(fields)
    if name is None:
        raise ValueError("must describe an EAGLE-3 head or a block draft")
    if name == "speculators":
        name = fields["speculators_model_type"]
        check("speculators_model_type", name, ("eagle3", "dflash", "dspark"))
    return (eagle3_from_public if name in ("specforge", "eagle3") else block_from_public)(fields, name)


def read_public_config(directory: Path) -> tuple[Eagle3Config | BlockConfig, tuple[int, ...]]:
    """Return the draft's config and feature layers. Raises a one-line ValueError that names the file and the field."""
    path = directory / "config.json"
    fields = read_json(path)
    with errors_name(path):
        return draft_from_public(fields)


def load_public_draft(directory: Path, mesh: Mesh, param_dtype: Dtype | None = None) -> SavedDraft:
    """Load the draft in a directory of any dialect, sharded over the mesh.

    Reads safetensors, or `pytorch_model.bin` if torch is installed. By default every tensor keeps its dtype.

    Raises a one-line ValueError naming the field or tensor: for a config that is not implemented, a missing, unexpected
    or mis-shaped tensor, or an invalid vocabulary map. Raises ImportError without safetensors.
    """
    config, layers = read_public_config(directory)
    dialect = dialect_of(read_json(directory / "config.json"))
    assert dialect is not None
    views, tensors = open_draft(directory), draft_tensors(config, dialect)
    vocabulary = {name: views.pop(name)[:] for name in (TO_TARGET, TO_DRAFT) if name in views}
    for name in copied_tables(config):
        views.pop(name, None)
    check_names(directory, views, tensors)
    with errors_name(directory):
        ids = read_target_ids(vocabulary, config)
    targets = fitting_params(init_of(config), mesh)
    return SavedDraft(config, read_tensors(directory, views, tensors, targets, param_dtype, DRAFT_DTYPES), ids, layers)

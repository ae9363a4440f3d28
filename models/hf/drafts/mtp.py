"""MTP heads among the tensors of a policy in Hugging Face layout.

Hugging Face's loaders drop these tensors for several families. We read them by name.
"""

from functools import partial
from pathlib import Path

from jax.sharding import Mesh

from models.config import DecoderConfig, Dtype
from models.drafts.mtp import MTPConfig, init_mtp, mtp_config
from models.files import read_json
from models.hf.layout import EMBEDDING
from models.hf.load import check_names, check_repeats, open_tensors, read_tensors
from models.hf.mtp_layout import COUNTS, embedding_copy, mtp_names, mtp_tensors
from models.json_fields import show
from models.params import fitting_params
from specjax.types import PyTree

MTPHead = tuple[MTPConfig, PyTree]


def load_mtp(directory: Path, policy: DecoderConfig, mesh: Mesh, param_dtype: Dtype | None = None) -> MTPHead | None:
    """Load the policy's MTP head from its directory, sharded over the mesh; None if it has none.

    The tensors' names determine the convention. The head's block has the shape of the policy, `policy`. By default
    every tensor keeps the dtype of the file.

    Raises a one-line ValueError naming the field or tensor: for a head of several layers, a head that `config.json`
    announces but the weights lack, tensors of two conventions, a missing, unexpected or mis-shaped tensor, or a copy of
    the embedding that differs from it. Raises ImportError without safetensors.
    """
    views = open_tensors(directory)
    names_by_convention = mtp_names(views, policy.num_layers)
    _check_counts(directory / "config.json", bool(names_by_convention))
    if not names_by_convention:
        return None
    (convention, names), *others = names_by_convention.items()
    if others:
        raise ValueError(f"{others[0][1][0]}: has another convention than {names[0]} in {directory}")
    config = mtp_config(policy, convention)
    head_views, tensors = {name: views[name] for name in names}, mtp_tensors(config, policy.num_layers)
    copy = embedding_copy(config, policy.num_layers)
    check_names(directory, head_views, tensors.keys() | ({copy} if copy else set()))
    if copy:
        check_repeats(head_views[copy], views[EMBEDDING], f"{copy}: differs from {EMBEDDING}, whose copy it must be")
    targets = fitting_params(partial(init_mtp, config), mesh)
    return config, read_tensors(directory, head_views, tensors, targets, param_dtype)


def _check_counts(path: Path, has_head: bool) -> None:
    fields = read_json(path)
    for name in COUNTS:
        count = fields.get(name)
        if has_head and count not in (None, 1):
            raise ValueError(f"{path}: {name} = {show(count)}: must be 1; the weights hold an MTP head of one layer")
        if count and not has_head:
            raise ValueError(f"{path}: {name} = {show(count)}: must be 0; the weights hold no MTP head")

"""The MTP head that a run's draft section names."""

from functools import partial
from pathlib import Path

import jax
from jax.sharding import Mesh

from configs.schema import RunConfig
from models.config import DecoderConfig
from models.mtp import init_mtp, make_mtp, mtp_config
from models.mtp_files import load_mtp
from models.params import init_params
from specjax.drafters import Drafter
from specjax.types import Policy, PyTree


def build_mtp(
    config: RunConfig, decoder: DecoderConfig, policy: Policy, mesh: Mesh, key: jax.Array
) -> tuple[Drafter, PyTree]:
    """The head that the policy's checkpoint holds, or where it has none, one from random weights; and its parameters.

    Raises ValueError where the checkpoint's head cannot be read.
    """
    path, found = config.model.path, None
    if path is not None:
        found = load_mtp(Path(path), decoder, mesh, config.model.param_dtype)
    if found is None:
        head = mtp_config(decoder, config.draft.mtp_convention)
        found = head, init_params(partial(init_mtp, head), key, mesh)
    head, params = found
    return make_mtp(head, policy, config.draft.unroll), params

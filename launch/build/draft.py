"""The draft that a run names: of any kind, from a checkpoint or from random weights."""

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from configs.schema import RunConfig
from configs.schema.networks import DraftConfig, ModelConfig
from launch.build.policy import build_policy
from launch.cli.errors import ConfigError
from models.checkpoints.draft import SavedDraft
from models.config import DecoderConfig
from models.decoder import make_policy
from models.drafts.eagle3 import Eagle3Config, init_eagle3, make_eagle3
from models.drafts.mtp import CONVENTIONS, MTPConfig, init_mtp, make_mtp, mtp_config
from models.hf.mtp_files import load_mtp
from models.params import init_params
from specjax.drafters import Drafter, HeadDrafter, ModelDrafter, NoDrafter
from specjax.types import Policy, PyTree

# Of an EAGLE-3 head, an MTP head or a small model.
Head = Eagle3Config | MTPConfig | DecoderConfig


class Draft(NamedTuple):
    """A draft as a function, its parameters on the mesh, and its shape; None where it has none.

    read_from: the option that names where its weights were read; None for random ones.
    """

    drafter: Drafter
    params: PyTree
    head: Head | None = None
    read_from: str | None = None


def build_draft(
    config: RunConfig,
    saved: SavedDraft | None,
    target_ids: np.ndarray | None,
    decoder: DecoderConfig,
    policy: Policy,
    mesh: Mesh,
    key: jax.Array,
) -> Draft:
    """The draft of `policy`, which has the shape `decoder`.

    saved:      an EAGLE-3 head from a checkpoint. target_ids: int32 [draft.vocab_size], of one that is not.
    Raises ValueError where a checkpoint cannot be read or does not fit the policy.
    """
    draft = config.draft
    if draft.kind == "model":
        return _model(config, decoder, mesh, key)
    if draft.kind == "mtp":
        made = _mtp(config, decoder, policy, mesh, key)
    elif draft.kind == "eagle3":
        head = saved or fresh_head(draft, decoder, mesh, key, target_ids)
        drafter = make_eagle3(head.config, policy, head.target_ids)
        made = Draft(drafter, head.params, head.config, None if saved is None else "draft.path")
    else:
        return Draft(NoDrafter(), {})
    assert isinstance(made.drafter, HeadDrafter)
    trained = replace(made.drafter, unroll=draft.unroll, decay=draft.decay, objective=draft.loss)
    return made._replace(drafter=trained)


def fresh_head(
    draft: DraftConfig, policy: DecoderConfig, mesh: Mesh, key: jax.Array, target_ids: np.ndarray | None
) -> SavedDraft:
    """A head from random weights, as wide as the policy where the run does not say otherwise."""
    head = Eagle3Config(
        hidden_size=policy.hidden_size,
        intermediate_size=draft.intermediate_size or policy.intermediate_size,
        num_heads=draft.num_heads or policy.num_heads,
        num_kv_heads=draft.num_kv_heads or policy.num_kv_heads,
        head_dim=draft.head_dim or policy.head_dim,
        rope_theta=policy.rope_theta,
        rope_scaling=policy.rope_scaling,
        norm_eps=policy.norm_eps,
        dtype=policy.dtype,
        param_dtype=policy.param_dtype,
        vocab_size=policy.vocab_size,
        draft_vocab_size=draft.vocab_size or policy.vocab_size,
        feature_size=policy.hidden_size * (len(policy.feature_layers) if draft.head.use_aux_hidden_state else 1),
        max_positions=policy.max_positions,
        **asdict(draft.head),
    )
    head.check(policy)
    params = init_params(partial(init_eagle3, head), key, mesh)
    return SavedDraft(head, params, target_ids, policy.feature_layers)


def _mtp(config: RunConfig, decoder: DecoderConfig, policy: Policy, mesh: Mesh, key: jax.Array) -> Draft:
    """The head that the policy's checkpoint holds, or where the run names a convention, one from random weights."""
    path, convention = config.model.path, config.draft.mtp_convention
    if convention is not None:
        head = mtp_config(decoder, convention)
        return Draft(make_mtp(head, policy), init_params(partial(init_mtp, head), key, mesh), head)
    found = None if path is None else load_mtp(Path(path), decoder, mesh, config.model.param_dtype)
    if found is None:
        raise ConfigError(
            f"draft.mtp_convention = None: must be {' or '.join(CONVENTIONS)}, model.path = {path} holds no MTP head"
        )
    head, params = found
    return Draft(make_mtp(head, policy), params, head, "model.path")


def _model(config: RunConfig, policy: DecoderConfig, mesh: Mesh, key: jax.Array) -> Draft:
    draft = config.draft
    model = ModelConfig(
        path=draft.path, architecture=draft.architecture, dtype=policy.dtype, param_dtype=policy.param_dtype
    )
    decoder, params = build_policy(model, mesh, key, "draft", features=False)
    if decoder.vocab_size != policy.vocab_size:
        raise ConfigError(f"draft.kind = model: its vocab_size is {decoder.vocab_size}, must be {policy.vocab_size}")
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    if decoder.max_positions < longest:
        raise ConfigError(
            f"draft.kind = model: its max_positions is {decoder.max_positions}, must be at least "
            f"data.max_prompt_tokens + rollout.max_new_tokens = {longest}"
        )
    decoder = replace(decoder, feature_layers=())
    read_from = None if draft.path is None else "draft.path"
    return Draft(ModelDrafter(make_policy(decoder), draft.loss), params, decoder, read_from)

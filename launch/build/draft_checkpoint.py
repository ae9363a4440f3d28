"""A draft from a checkpoint, held against the policy and the run that it is to draft for."""

from dataclasses import replace
from pathlib import Path

import jax
from jax.sharding import Mesh

from configs.schema import RunConfig
from launch.cli.errors import ConfigError
from models.checkpoints.draft import SavedDraft, load_draft_checkpoint
from models.checkpoints.made_for import MadeFor, read_made_for
from models.config import DecoderConfig, eagle3_feature_layers
from models.drafts.eagle3 import Eagle3Config
from models.drafts.mtp import MTPConfig
from models.files import CARRIED, errors_name, read_json
from models.hf.eagle3_dialects import check_stated_policy, dialect_of
from models.hf.eagle3_files import check_embedding, load_eagle3


def load_draft(path: Path, mesh: Mesh) -> SavedDraft:
    """The draft in a directory of ours or of a public dialect. Raises ValueError with one line where there is none."""
    if not (path / "config.json").is_file():
        raise ConfigError(f"draft.path = {path}: no config.json there")
    fields = read_json(path / "config.json")
    if "kind" in fields:
        return load_draft_checkpoint(path, mesh)
    if dialect_of(fields) is None:
        raise ConfigError(f"draft.path = {path}: its config.json is not that of a draft")
    return load_eagle3(path, mesh)


def layers_to_read(saved: SavedDraft, config: RunConfig) -> tuple[int, ...]:
    """The policy's layers that a saved draft reads; empty where neither it nor the run says which: `read_by`."""
    asked, own = config.model.feature_layers, saved.feature_layers
    if asked and own and asked != own:
        raise ConfigError(f"model.feature_layers = {asked}: the draft of draft.path reads {own}")
    return asked or own


def read_by(saved: SavedDraft, asked: tuple[int, ...], policy: DecoderConfig) -> DecoderConfig:
    """The policy with the layers that a saved draft reads: EAGLE-3's own choice where `layers_to_read` names none.

    What its directory says is what another draft reads. Raises ValueError where the policy is too shallow to choose.
    """
    if asked or not saved.config.use_aux_hidden_state:
        return policy
    return replace(policy, feature_layers=eagle3_feature_layers(policy.num_layers))


def fit_draft(saved: SavedDraft, config: RunConfig, policy: DecoderConfig, embedding: jax.Array) -> SavedDraft:
    """The draft in the dtypes of the run, once it is known to fit the policy.

    embedding: the policy's. Raises ValueError where shapes, layers or vocabulary do not fit, or the checkpoint tells
    that it was made for another policy. A head made for shorter sequences fits: its rotary embedding has no table that
    would end there, and heads are published with the length that they were trained at, far below their policy's.
    """
    saved.config.check(policy)
    path = Path(str(config.draft.path))
    source = path / (CARRIED if (path / "params").is_dir() else "config.json")
    if source.exists():
        with errors_name(source):
            check_stated_policy(read_json(source), policy)
    with errors_name(path):
        check_embedding(path, embedding)
    head = replace(saved.config, dtype=policy.dtype, param_dtype=policy.param_dtype)
    params = jax.tree.map(lambda x: x.astype(policy.param_dtype), saved.params)
    identity = head.draft_vocab_size == policy.vocab_size
    return saved._replace(config=head, params=params, target_ids=None if identity else saved.target_ids)


def stated(config: RunConfig, read_from: str | None, head: object, policy: DecoderConfig) -> MadeFor | None:
    """What a draft was made for by the file beside it; None where there is none.

    read_from: the option that names its directory, draft.path or model.path. head: the shape of what was read there.
    Raises ValueError with one line where the file is broken, or that of a head of another width.
    """
    path = {"draft.path": config.draft.path, "model.path": config.model.path}.get(str(read_from))
    found = None if path is None else read_made_for(Path(path))
    # A head is as wide as its policy, a small model is not.
    if found is not None and isinstance(head, Eagle3Config | MTPConfig) and found.hidden_size != policy.hidden_size:
        raise ValueError(
            f"{read_from} = {path}: its made_for.json states hidden_size = {found.hidden_size}, must be the policy's "
            f"hidden_size = {policy.hidden_size}"
        )
    return found

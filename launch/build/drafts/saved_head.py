"""EAGLE-3 heads from checkpoints, checked against the policy and the run."""

from dataclasses import replace
from pathlib import Path

import jax
from jax.sharding import Mesh

from configs.schema import RunConfig
from launch.cli.errors import ConfigError
from models.checkpoints.draft import SavedDraft, load_draft_checkpoint
from models.config import DecoderConfig, eagle3_feature_layers
from models.files import CARRIED, errors_name, read_json
from models.hf.eagle3_dialects import check_stated_policy, dialect_of
from models.hf.eagle3_files import check_embedding, load_eagle3


def read_head(config: RunConfig, mesh: Mesh) -> SavedDraft | None:
    """Return the EAGLE-3 head of draft.path; None if the run names none."""
    draft = config.draft
    return load_head(Path(draft.path), mesh) if draft.kind == "eagle3" and draft.path is not None else None


def load_head(path: Path, mesh: Mesh) -> SavedDraft:
    """Load the draft of a directory, in our layout or a public dialect. Raises ValueError if it holds none."""
    if not (path / "config.json").is_file():
        raise ConfigError(f"draft.path = {path}: no config.json there")
    fields = read_json(path / "config.json")
    if "kind" in fields:
        return load_draft_checkpoint(path, mesh)
    if dialect_of(fields) is None:
        raise ConfigError(f"draft.path = {path}: its config.json is not that of a draft")
    return load_eagle3(path, mesh)


def layers_to_read(saved: SavedDraft, config: RunConfig) -> tuple[int, ...]:
    """Return the policy's layers that a saved draft reads; () if neither the draft nor the run names them."""
    asked, own = config.model.feature_layers, saved.feature_layers
    if asked and own and asked != own:
        raise ConfigError(f"model.feature_layers = {asked}: the draft of draft.path reads {own}")
    return asked or own


def read_by(saved: SavedDraft, asked: tuple[int, ...], policy: DecoderConfig) -> DecoderConfig:
    """Return the policy with the layers that a saved draft reads: EAGLE-3's defaults if `layers_to_read` names none.

    The layers in the policy's own directory belong to another draft. Raises ValueError if the policy is too shallow.
    """
    if asked or not saved.config.use_aux_hidden_state:
        return policy
    return replace(policy, feature_layers=eagle3_feature_layers(policy.num_layers))


def fit_head(saved: SavedDraft, config: RunConfig, policy: DecoderConfig, embedding: jax.Array) -> SavedDraft:
    """Check that the draft fits the policy and return it in the run's dtypes.

    embedding: the policy's. Raises ValueError if shapes, layers or vocabulary do not fit, or the checkpoint states
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

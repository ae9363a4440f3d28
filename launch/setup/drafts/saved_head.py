"""Loader of EAGLE-3 heads and block drafts, and checks that they fit the policy and the run."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from configs.schema import DraftConfig, RunConfig, kind_of
from launch.data.hub import checkpoint_directory
from launch.errors import ConfigError, as_config_error
from models.checkpoints.draft import SavedDraft, init_of, load_draft_checkpoint, read_draft_config
from models.config import DecoderConfig
from models.drafts.shape import FeatureDraftConfig
from models.files import CARRIED, errors_name, read_json
from models.hf.drafts.carried import check_copies, copied_tables, policy_tables
from models.hf.drafts.dialects import dialect_of
from models.hf.drafts.reader import load_public_draft, read_public_config
from models.hf.drafts.stated_policy import check_stated_policy
from models.params import abstract_params
from specjax.types import PyTree


def read_head(config: RunConfig, mesh: Mesh, *, shapes: bool = False) -> SavedDraft | None:
    """Load the head or block draft of draft.path. Return None for other kinds, or if draft.path is not set.

    shapes: see `load_head`.
    """
    draft = config.draft
    if kind_of(draft.kind).feature_layers is None or draft.path is None:
        return None
    saved = load_head(checkpoint_directory("draft.path", draft.path), mesh, shapes=shapes)
    if (kind := saved.config.kind) != draft.kind:
        raise ConfigError(f"draft.kind = {draft.kind}: must be {kind}, what draft.path = {draft.path} holds")
    return saved


def load_head(path: Path, mesh: Mesh, *, shapes: bool = False) -> SavedDraft:
    """Load a head or block draft in our layout or a public dialect. Raises ValueError if the directory holds none.

    shapes: read only `config.json`. Parameters are ShapeDtypeStructs, and `target_ids` is None.
    """
    read, load = _readers(path)
    if not shapes:
        return load(path, mesh)
    config, layers = read(path)
    return SavedDraft(config, abstract_params(init_of(config), mesh), None, layers)


def most_drafted(draft: DraftConfig) -> int | None:
    """Return the block size of a block draft; None for other kinds. Reads only the `config.json` of draft.path."""
    kind = kind_of(draft.kind)
    if kind.feature_layers is None:
        return None
    if draft.path is None:
        return draft.shape().get("block_size")
    path = checkpoint_directory("draft.path", draft.path)
    with as_config_error():
        config, _ = _readers(path)[0](path)
    return config.most_drafted


def _readers(
    path: Path,
) -> tuple[Callable[[Path], tuple[FeatureDraftConfig, tuple[int, ...]]], Callable[[Path, Mesh], SavedDraft]]:
    """Return the functions that read the shape, and all, of a head or block draft in this directory."""
    if not (path / "config.json").is_file():
        raise ConfigError(f"draft.path = {path}: must hold a config.json")
    fields = read_json(path / "config.json")
    if "kind" in fields:
        return read_draft_config, load_draft_checkpoint
    if dialect_of(fields) is not None:
        return read_public_config, load_public_draft
    raise ConfigError(f"draft.path = {path}: its config.json must describe an EAGLE-3 head or a block draft")


def layers_to_read(saved: SavedDraft, config: RunConfig) -> tuple[int, ...]:
    """Return the layers of the policy that a saved head reads; () if neither the run nor the head states them.

    Raises ConfigError if the two state different layers.
    """
    configured, stated = config.model.feature_layers, saved.feature_layers
    if configured and stated and configured != stated:
        raise ConfigError(f"model.feature_layers = {configured}: must be {stated}, which the draft of draft.path reads")
    return configured or stated


def fit_head(saved: SavedDraft, config: RunConfig, policy: DecoderConfig, weights: PyTree | None) -> SavedDraft:
    """Check that a saved head fits the policy. Return it in the dtypes of the policy.

    Raises ValueError if shapes, layers or vocabulary do not fit, or if the checkpoint states another policy. A smaller
    max_positions than the policy's is allowed: published heads state the length that they were trained at, and our
    rotary embedding does not end there.

    weights: the policy's; None for a head whose parameters are shapes. Its reduced vocabulary is the first ids.
    """
    saved.config.check(policy)
    path = checkpoint_directory("draft.path", str(config.draft.path))
    source = path / (CARRIED if (path / "params").is_dir() else "config.json")
    if source.exists():
        with errors_name(source):
            check_stated_policy(read_json(source), policy)
    head = replace(saved.config, dtype=policy.dtype, param_dtype=policy.param_dtype)
    ids = saved.target_ids
    if weights is None:
        ids = np.arange(head.draft_vocab_size, dtype=np.int32)
        params = jax.tree.map(lambda x: x.update(dtype=jnp.dtype(policy.param_dtype)), saved.params)
    else:
        tables = policy_tables(policy, weights)
        with errors_name(path):
            check_copies(path, {name: tables[name] for name in copied_tables(head)})
        params = jax.tree.map(lambda x: x.astype(policy.param_dtype), saved.params)
    ids = None if head.draft_vocab_size == policy.vocab_size else ids
    return saved._replace(config=head, params=params, target_ids=ids)

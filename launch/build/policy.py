"""Construction of a run's policy: a decoder from a checkpoint or random weights, or a user's model family."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from configs.schema import DraftConfig, ModelConfig, RunConfig
from launch.build.drafts.saved_head import layers_to_read, read_by
from launch.cli.errors import ConfigError
from launch.cli.functions import load_function
from models.checkpoints.draft import SavedDraft
from models.checkpoints.policy import load_policy_checkpoint
from models.config import DecoderConfig, eagle3_feature_layers
from models.decoder import init_decoder, make_policy
from models.hf.config import read_hf_config
from models.hf.load import load_policy
from models.params import init_params, replicate
from specjax.types import Policy, PyTree

# Builds the policy of model.family: (the model section, the mesh, a key for random weights) -> the policy and its
# parameters, which are replicated on the mesh unless they have a place there.
Family = Callable[[ModelConfig, Mesh, jax.Array], tuple[Policy, PyTree]]


class BuiltPolicy(NamedTuple):
    """A policy as functions, its parameters on the mesh, and its decoder's config (None for a user's family)."""

    policy: Policy
    weights: PyTree
    decoder: DecoderConfig | None


def build_policy(config: RunConfig, saved: SavedDraft | None, mesh: Mesh, key: jax.Array) -> BuiltPolicy:
    """Build the policy, with the features that the EAGLE-3 head reads if there is one.

    saved: the head, if it comes from a checkpoint.
    """
    model = config.model
    if model.family is not None:
        return _build_family(model, model.family, mesh, key)
    if saved is None:
        decoder, weights = build_decoder(model, mesh, key, "model", features=_reads_layers(config.draft))
    else:
        model = replace(model, feature_layers=layers_to_read(saved, config))
        features = saved.config.use_aux_hidden_state
        decoder, weights = build_decoder(model, mesh, key, "model", features=features)
        decoder = read_by(saved, model.feature_layers, decoder)
    return BuiltPolicy(make_policy(decoder, model.remat), weights, decoder)


def build_decoder(
    model: ModelConfig, mesh: Mesh, key: jax.Array, section: str, *, features: bool
) -> tuple[DecoderConfig, PyTree]:
    """Build a decoder: return its config and parameters. features: whether it returns the features EAGLE-3 reads.

    section: name of the config section that `model` is, for errors. A small draft model is built like a policy.
    """
    dtypes = dict(dtype=model.dtype, param_dtype=model.param_dtype)
    if model.path is None:
        if model.architecture is None:
            raise ConfigError(f"{section}.path = None: must be a directory as Hugging Face or launch.convert writes it")
        architecture = replace(model.architecture, **dtypes)
        layers = ()
        if features:
            given = model.feature_layers or architecture.feature_layers
            layers = given or eagle3_feature_layers(architecture.num_layers)
        decoder = replace(architecture, feature_layers=layers)
        return decoder, init_params(partial(init_decoder, decoder), key, mesh)
    path = Path(model.path)
    if not (path / "config.json").is_file():
        raise ConfigError(f"{section}.path = {path}: no config.json there")
    if (path / "params").is_dir():
        decoder, weights = load_policy_checkpoint(path, mesh)
        weights = jax.tree.map(lambda x: x.astype(model.param_dtype), weights)
        layers = (model.feature_layers or decoder.feature_layers) if features else ()
        return replace(decoder, **dtypes, feature_layers=layers), weights
    decoder = replace(read_hf_config(path, (model.feature_layers or None) if features else ()), **dtypes)
    return decoder, load_policy(path, decoder, mesh, model.param_dtype)


def _build_family(model: ModelConfig, name: str, mesh: Mesh, key: jax.Array) -> BuiltPolicy:
    match load_function("model.family", name)(model, mesh, key):
        case (Policy() as policy, weights):
            return BuiltPolicy(policy, replicate(weights, mesh), None)
        case other:
            raise ConfigError(f"model.family = {name}: returned {type(other).__name__}, must return (Policy, params)")


def _reads_layers(draft: DraftConfig) -> bool:
    return draft.kind == "eagle3" and draft.head.use_aux_hidden_state

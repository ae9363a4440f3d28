"""Construction of the policy: a decoder from a checkpoint or with random weights, or a user's model family."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from configs.schema import DraftConfig, ModelConfig, RunConfig
from launch.build.decoder_config import read_decoder
from launch.build.drafts.saved_head import layers_to_read, read_by
from launch.cli.errors import ConfigError
from launch.cli.functions import load_function
from launch.data.hub import checkpoint_directory
from models.checkpoints.draft import SavedDraft
from models.checkpoints.policy import load_policy_checkpoint, read_policy_config
from models.config import DecoderConfig, eagle3_feature_layers
from models.decoder import init_decoder, make_policy
from models.hf.load import load_policy
from models.params import init_params, replicate
from specjax.checkpoint_integrity import check_finite
from specjax.types import Policy, PyTree

# User function that model.family names: (model section, mesh, key for random weights) -> (policy, parameters).
# Parameters that are not placed on the mesh are replicated over it.
Family = Callable[[ModelConfig, Mesh, jax.Array], tuple[Policy, PyTree]]


class BuiltPolicy(NamedTuple):
    """A policy as functions, its parameters on the mesh, and its decoder's config (None for a user's family)."""

    policy: Policy
    weights: PyTree
    decoder: DecoderConfig | None


def build_policy(config: RunConfig, saved: SavedDraft | None, mesh: Mesh, key: jax.Array) -> BuiltPolicy:
    """Build the policy. If the draft is an EAGLE-3 head, the policy returns the features that the head reads.

    saved: the head, if it comes from a checkpoint; it determines the feature layers.
    """
    model, longest = config.model, longest_sequence(config)
    if model.family is not None:
        return _build_family(model, model.family, mesh, key)
    if saved is None:
        decoder, weights = build_decoder(model, mesh, key, "model", longest, features=_reads_features(config.draft))
    else:
        model = replace(model, feature_layers=layers_to_read(saved, config))
        features = saved.config.use_aux_hidden_state
        decoder, weights = build_decoder(model, mesh, key, "model", longest, features=features)
        decoder = read_by(saved, model.feature_layers, decoder)
    return BuiltPolicy(make_policy(decoder, model.remat), weights, decoder)


def longest_sequence(config: RunConfig) -> int:
    """Return the most tokens that a prompt and its completion can have."""
    return config.data.max_prompt_tokens + config.rollout.max_new_tokens


def build_decoder(
    model: ModelConfig, mesh: Mesh, key: jax.Array, section: str, longest: int, *, features: bool
) -> tuple[DecoderConfig, PyTree]:
    """Build a decoder from a checkpoint or with random weights. Return its config and parameters.

    Builds a policy or a small draft model.

    Args:
        section:  config section that `model` stands for, for error messages.
        longest:  length of the longest sequence, for which the decoder must have positions.
        features: let the decoder return the features that EAGLE-3 reads.
    """
    dtypes = dict(dtype=model.dtype, param_dtype=model.param_dtype)
    if model.path is None:
        if model.architecture is None:
            raise ConfigError(f"{section}.path = None: must be a directory as Hugging Face or launch.convert writes it")
        architecture = replace(model.architecture, **dtypes)
        layers = ()
        if features:
            configured = model.feature_layers or architecture.feature_layers
            layers = configured or eagle3_feature_layers(architecture.num_layers)
        decoder = replace(architecture, feature_layers=layers)
        _check_positions(decoder, longest, f"{section}.architecture")
        return decoder, init_params(partial(init_decoder, decoder), key, mesh)
    path = checkpoint_directory(f"{section}.path", model.path)
    if not (path / "config.json").is_file():
        raise ConfigError(f"{section}.path = {path}: holds no config.json")
    if (path / "params").is_dir():
        _check_positions(read_policy_config(path), longest, f"{section}.path = {path}")
        decoder, weights = load_policy_checkpoint(path, mesh)
        weights = jax.tree.map(lambda x: x.astype(model.param_dtype), weights)
        layers = (model.feature_layers or decoder.feature_layers) if features else ()
        return replace(decoder, **dtypes, feature_layers=layers), weights
    layers = (model.feature_layers or None) if features else ()
    decoder = replace(read_decoder(path, layers, f"{section}.path = {path}"), **dtypes)
    _check_positions(decoder, longest, f"{section}.path = {path}")
    return decoder, load_policy(path, decoder, mesh, model.param_dtype)


def _check_positions(decoder: DecoderConfig, longest: int, owner: str) -> None:
    if decoder.max_positions < longest:
        raise ConfigError(
            f"data.max_prompt_tokens + rollout.max_new_tokens = {longest}: must be at most {decoder.max_positions}, "
            f"the positions of {owner}"
        )


def _build_family(model: ModelConfig, name: str, mesh: Mesh, key: jax.Array) -> BuiltPolicy:
    match load_function("model.family", name)(model, mesh, key):
        case (Policy() as policy, weights):
            weights = replicate(weights, mesh)
            check_finite(weights, f"model.family = {name}")
            return BuiltPolicy(policy, weights, None)
        case result:
            raise ConfigError(f"model.family = {name}: returned {type(result).__name__}, must return (Policy, params)")


def _reads_features(draft: DraftConfig) -> bool:
    return draft.kind == "eagle3" and draft.head.use_aux_hidden_state

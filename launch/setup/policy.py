"""Construction of the policy: a decoder from a checkpoint or with random weights, or a user's model family."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from configs.schema import ModelConfig, RunConfig, kind_of
from launch.cli.functions import load_function, refusing_errors
from launch.console import console
from launch.data.hub import checkpoint_directory
from launch.errors import ConfigError
from launch.setup.drafts.saved_head import layers_to_read
from models.checkpoints.draft import SavedDraft
from models.config import DecoderConfig
from models.decoder import init_decoder, make_policy
from models.files import errors_name, optional
from models.hf.config import config_to_hf, read_hf_config
from models.hf.load import has_own_head, load_policy
from models.params import Init, abstract_params, init_params, replicate
from specjax.checkpoint_integrity import check_finite
from specjax.types import Policy, PyTree

# User function named by model.family: (model section, mesh, key for random weights) -> (policy, parameters).
# Parameters that it does not place on the mesh are replicated.
Family = Callable[[ModelConfig, Mesh, jax.Array], tuple[Policy, PyTree]]


class BuiltPolicy(NamedTuple):
    """A policy as functions, its parameters on the mesh, and its decoder's config (None for a user's family)."""

    policy: Policy
    weights: PyTree
    decoder: DecoderConfig | None


def build_policy(config: RunConfig, saved: SavedDraft | None, mesh: Mesh, key: jax.Array | None) -> BuiltPolicy:
    """Build the policy. It returns the features that the draft reads.

    saved: the draft, if it comes from a checkpoint; it determines the feature layers.
    key:   key for random weights. None: build the parameters as shapes without reading weights.
    """
    model, longest = config.model, longest_sequence(config)
    if config.lora.enabled:
        # Frozen weights need no precision beyond that of the computation.
        model = replace(model, param_dtype=model.dtype)
    if model.family is not None:
        if key is None:
            raise ConfigError(f"model.family = {model.family}: must be None for a plan; it supports built-in families")
        return _build_family(model, model.family, mesh, key)
    reads_layers = config.draft.head.use_aux_hidden_state
    if saved is not None:
        model, reads_layers = replace(model, feature_layers=layers_to_read(saved, config)), saved.config.reads_layers
    features = kind_of(config.draft.kind).feature_layers if reads_layers else None
    decoder, weights = build_decoder(model, mesh, key, "model", longest, features=features)
    # A draft, which is trained, takes its dtypes from the decoder's config.
    decoder = replace(decoder, param_dtype=config.model.param_dtype)
    policy = replace(make_policy(decoder, model.remat), eight_bit=model.rollout_dtype, merged=config.lora.merged)
    return BuiltPolicy(policy, weights, decoder)


def longest_sequence(config: RunConfig) -> int:
    """Return the largest number of tokens in a prompt and its completion together."""
    return config.data.max_prompt_tokens + config.rollout.max_new_tokens


def build_decoder(
    model: ModelConfig,
    mesh: Mesh,
    key: jax.Array | None,
    section: str,
    longest: int,
    *,
    features: Callable[[int], tuple[int, ...]] | None,
) -> tuple[DecoderConfig, PyTree]:
    """Build a policy or a small draft model, from a checkpoint or with random weights. Return config and parameters.

    Args:
        key:      key for random weights. None: return the parameters as shapes, and read only a checkpoint's config.
        section:  name of the config section that `model` describes, for error messages.
        longest:  length of the longest sequence. The decoder must support as many positions.
        features: number of layers -> layers that the draft reads, unless the section names others. None: it reads none.
    """
    dtypes = dict(dtype=model.dtype, param_dtype=model.param_dtype)
    if model.path is None:
        if model.architecture is None:
            raise ConfigError(f"{section}.path = None: must be a directory in Hugging Face layout")
        architecture = replace(model.architecture, **dtypes)
        layers = ()
        if features is not None:
            configured = model.feature_layers or architecture.feature_layers
            layers = configured or features(architecture.num_layers)
        decoder = replace(architecture, feature_layers=layers)
        _check_positions(decoder, longest, f"{section}.architecture")
        return decoder, random_params(partial(init_decoder, decoder), key, mesh)
    path = checkpoint_directory(f"{section}.path", model.path)
    if not (path / "config.json").is_file():
        raise ConfigError(f"{section}.path = {path}: must hold a config.json")
    owner, decoder = f"{section}.path = {path}", read_hf_config(path, ())
    if features is not None:
        with errors_name(path / "config.json"):
            decoder = replace(decoder, feature_layers=model.feature_layers or features(decoder.num_layers))
    decoder = replace(decoder, **dtypes)
    _check_positions(decoder, longest, owner)
    if key is None:
        return decoder, abstract_params(partial(init_decoder, decoder), mesh)
    if decoder.tie_embeddings and has_own_head(path):
        console.print(
            f"{owner}: tie_word_embeddings = true, but the stored lm_head.weight differs from the embedding: loaded "
            "untied"
        )
        decoder = replace(decoder, tie_embeddings=False)
    return decoder, load_policy(path, decoder, mesh, model.param_dtype)


def random_params(init: Init, key: jax.Array | None, mesh: Mesh) -> PyTree:
    """Return random parameters; without a key, their shapes."""
    return abstract_params(init, mesh) if key is None else init_params(init, key, mesh)


def check_exportable(decoder: DecoderConfig, owner: str) -> None:
    """Raise ConfigError if the decoder cannot be written in Hugging Face layout. owner: what it is, for the message."""
    try:
        config_to_hf(decoder)
        for module in ("safetensors", "huggingface_hub"):
            optional(module)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"{owner} cannot be written: {error}") from error


def _check_positions(decoder: DecoderConfig, longest: int, owner: str) -> None:
    if decoder.max_positions < longest:
        raise ConfigError(
            f"data.max_prompt_tokens + rollout.max_new_tokens = {longest}: must be at most {decoder.max_positions}, "
            f"the number of positions of {owner}"
        )


def _build_family(model: ModelConfig, name: str, mesh: Mesh, key: jax.Array) -> BuiltPolicy:
    build = load_function("model.family", name)
    with refusing_errors("model.family", name, "take (ModelConfig, Mesh, key), and return (Policy, params)"):
        built = build(model, mesh, key)
    match built:
        case (Policy() as policy, weights):
            weights = replicate(weights, mesh)
            check_finite(weights, f"model.family = {name}")
            return BuiltPolicy(policy, weights, None)
        case result:
            raise ConfigError(f"model.family = {name}: returned {type(result).__name__}; must return (Policy, params)")

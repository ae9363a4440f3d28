"""The policy that a run names: from a checkpoint, or from random weights."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
from jax.sharding import Mesh

from configs.schema.networks import ModelConfig
from launch.cli.errors import ConfigError
from models.checkpoints.policy import load_policy_checkpoint
from models.config import DecoderConfig, eagle3_feature_layers
from models.decoder import init_decoder
from models.hf.config import read_hf_config
from models.hf.load import load_policy
from models.params import init_params
from specjax.types import PyTree


def build_policy(
    model: ModelConfig, mesh: Mesh, key: jax.Array, section: str, *, features: bool
) -> tuple[DecoderConfig, PyTree]:
    """The network, with `features` such that it gives those that EAGLE-3 reads.

    section: of the configuration that `model` is, for errors; a small model that drafts is built like a policy.
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

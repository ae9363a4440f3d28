"""Construction of a policy's adapters beside its frozen weights."""

from functools import partial

import jax
from jax.sharding import Mesh

from configs.schema import LoraConfig
from launch.setup.policy import random_params
from models.config import DecoderConfig
from models.decoder import init_decoder
from models.lora import adapted_layers, init_adapters, with_scales
from specjax.types import PyTree


def build_adapters(
    lora: LoraConfig, decoder: DecoderConfig, base: PyTree, mesh: Mesh, key: jax.Array | None
) -> tuple[PyTree, PyTree]:
    """Return (adapters, base with their scales). key: for A; None: both are ShapeDtypeStructs.

    Raises ValueError for layers that the decoder does not have.
    """
    layers = adapted_layers(partial(init_decoder, decoder), lora)
    adapters = random_params(partial(init_adapters, layers), key, mesh)
    return adapters, with_scales(base, layers, mesh, shapes=key is None)

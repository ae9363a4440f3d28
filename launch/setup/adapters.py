"""A policy's adapters: their construction beside the frozen weights, and their addition to these for an export."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import flax.traverse_util
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from configs.schema import LoraConfig, RunConfig
from launch.data.hub import checkpoint_directory, hub_name
from launch.errors import ConfigError
from launch.setup.policy import random_params
from models.checkpoints.made_for import MadeFor, read_made_for
from models.config import DecoderConfig, Dtype
from models.decoder import init_decoder
from models.hf.peft_files import CONFIG, load_adapters, read_peft, stated_base
from models.lora import Adapted, adapted_layers, init_adapters, with_scales
from specjax.adapters import KERNEL, SCALE, A, B, delta, merged
from specjax.parallel import processes
from specjax.quantization import QuantizedKernel, quantized
from specjax.types import EightBit, Params, PyTree

_COMMIT = re.compile("[0-9a-f]{40}")


def build_adapters(
    lora: LoraConfig, decoder: DecoderConfig, base: PyTree, mesh: Mesh, key: jax.Array | None
) -> tuple[PyTree, PyTree]:
    """Return (adapters, base with their scales). key: for A; None: both are ShapeDtypeStructs.

    With `lora.base_dtype` the base is quantized, and its arrays are deleted one by one.

    Raises ValueError for layers that the decoder does not have, and for files that cannot be read.
    """
    layers = layers_of(lora, decoder)
    if lora.path is None or key is None:
        adapters = random_params(partial(init_adapters, layers), key, mesh)
    else:
        adapters = load_adapters(_directory(lora.path), layers, decoder, mesh)
    if lora.base_dtype is not None:
        base = quantized(base, lora.base_dtype)
    return adapters, with_scales(base, layers, mesh, shapes=key is None)


def layers_of(lora: LoraConfig, decoder: DecoderConfig) -> list[Adapted]:
    """Return the layers with adapters, by the options or by the files at `lora.path`."""
    if lora.path is None:
        return adapted_layers(partial(init_decoder, decoder), lora)
    return read_peft(_directory(lora.path), decoder)


def base_of(config: RunConfig, decoder: DecoderConfig, base_hash: str | None) -> MadeFor:
    """Return what the adapters of a run are made for: its frozen weights."""
    dtype = config.lora.base_dtype or config.model.dtype
    return MadeFor(config.model.path, decoder.hidden_size, decoder.num_layers, dtype=dtype, hash=base_hash)


def other_base(path: str, base: MadeFor) -> str | None:
    """Return a line if the adapters at `path`, `lora.path`, were made for other weights than the base.

    None if they were made for these, or if nothing tells: equal hashes are equal weights, whatever their names.
    """
    directory = _directory(path)
    stated = read_made_for(directory) or replace(base, dtype=None, hash=None)
    stated = replace(stated, policy=stated_base(directory))
    if None not in (stated.hash, base.hash):
        differs = stated.hash != base.hash
    else:
        # PEFT's files do not state a dtype; as a rule it is one of 16 or 32 bits.
        same_dtype = base.dtype not in get_args(EightBit) if stated.dtype is None else stated.dtype == base.dtype
        differs = not (same_dtype and _may_be_same(stated.policy, base.policy))
    if not differs:
        return None
    return f"lora.path = {path}: made for {stated}, but read beside {base}: log-probs may be others than in its run"


def _may_be_same(stated: str | None, path: str | None) -> bool:
    """Return whether two names or directories of weights may be of the same ones. Only commits tell revisions apart.

    A directory may be a copy of what has a name, or of a directory of another machine.
    """
    if stated is None:
        return True
    if path is None:  # random weights
        return False
    ours, theirs = hub_name(path, "model"), hub_name(stated, "model")
    if ours is None and theirs is None:
        return not Path(stated).exists() or Path(stated).resolve() == Path(path).resolve()
    if ours is None or theirs is None:
        return True
    commits = {revision for revision in (ours.revision, theirs.revision) if _COMMIT.fullmatch(revision or "")}
    return ours.repo == theirs.repo and len(commits) < 2


def merged_policy(params: Params, dtype: Dtype) -> tuple[PyTree, float]:
    """Return the policy with its adapters added in float32 and rounded once, and the share of elements that this lost.

    An element of an adapted kernel is lost if it is rounded to what it is without adapters, though its update is not 0.
    Kernels are merged one by one, because all of them in float32 may not fit.
    """
    base: dict[tuple[str, ...], Any] = flax.traverse_util.flatten_dict(params.base)
    adapters: dict[tuple[str, ...], Any] = flax.traverse_util.flatten_dict(params.policy)
    policy, lost, elements = dict[tuple[str, ...], jax.Array](), 0, 0
    for (*layer, name), weight in base.items():
        if name == SCALE:
            continue
        if isinstance(weight, QuantizedKernel):
            weight = weight.dequantized()
        policy[*layer, name] = unchanged = weight.astype(dtype)
        if name == KERNEL and (*layer, A) in adapters:
            a, b, scale = adapters[*layer, A], adapters[*layer, B], base[*layer, SCALE]
            exact = merged(Params({A: a, B: b}, {}, base={KERNEL: weight.astype(jnp.float32), SCALE: scale}))
            policy[*layer, name] = rounded = exact.policy[KERNEL].astype(dtype)
            lost += int(processes.fetch(jnp.sum((rounded == unchanged) & (delta(a, b, scale) != 0))))
            elements += weight.size
    return flax.traverse_util.unflatten_dict(policy), lost / max(elements, 1)


def _directory(path: str) -> Path:
    directory = checkpoint_directory("lora.path", path)
    if not (directory / CONFIG).is_file():
        raise ConfigError(f"lora.path = {directory}: must hold an {CONFIG}")
    return directory

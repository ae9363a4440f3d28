"""Export of parameters to a Hugging Face directory that transformers, vLLM and others load."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from models.config import DecoderConfig
from models.decoder import init_decoder
from models.drafts.mtp import MTPConfig, init_mtp
from models.files import new_directory, optional, write_json
from models.hf.config import config_to_hf
from models.hf.layout import EMBEDDING, Stored, stored_tensors
from models.hf.load import INDEX
from models.hf.mtp_layout import NAMES, embedding_copy, mtp_tensors
from models.params import Init, abstract_params, by_path
from specjax.parallel import processes
from specjax.types import PyTree

Tensor = tuple[Stored, jax.Array]


def save_policy(
    directory: Path,
    params: PyTree,
    config: DecoderConfig,
    carried: Mapping[str, Any] | None = None,
    max_file_bytes: int = 5_000_000_000,
    mtp: tuple[MTPConfig, PyTree] | None = None,
) -> None:
    """Write `config.json` and the safetensors of a decoder, completely or not at all.

    Every tensor keeps its bits and its dtype: tensors that `load_policy` read are written back byte for byte, under the
    same name. The host holds the tensors of one file at a time.

    Args:
        directory: directory to write; must not exist, or be empty.
        params: parameters of `Decoder(config)`, unboxed.
        config: config of the decoder. It determines the family: Qwen3 has q/k norm, Qwen2.5 qkv bias, Llama neither.
        carried: further fields for `config.json`, from `carried_fields`.
        max_file_bytes: file size above which the tensors are split over several files with an index.
        mtp: config and parameters of a head to include under the names of its convention.

    Raises ValueError if the directory is in use, the parameters do not fit the config, or no family fits it.
    Raises ImportError without safetensors and huggingface_hub.
    """
    save_file, hub = optional("safetensors.numpy").save_file, optional("huggingface_hub")
    flat = by_path(params)
    _check_fit("params", flat, partial(init_decoder, config))
    tensors = {name: (stored, flat[stored.path]) for name, stored in stored_tensors(config).items()}
    family, counts = None, {}
    if mtp is not None:
        tensors |= _head_tensors(mtp, tensors[EMBEDDING], config.num_layers)
        names = NAMES[mtp[0].convention.name]
        family, counts = names.family, {names.count: 1}
    fields = config_to_hf(replace(config, param_dtype=flat["embed", "embedding"].dtype.name), family) | counts
    files = hub.split_state_dict_into_shards_factory(
        {name: math.prod(stored.of(x.shape)) * x.dtype.itemsize for name, (stored, x) in tensors.items()},
        get_storage_size=lambda size: size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_file_bytes,
    )
    with new_directory(directory) as temporary:
        write_json(temporary / "config.json", {**(carried or {}), **fields})
        for file, names in files.filename_to_tensors.items():
            file_tensors = {name: tensors[name] for name in names}
            arrays = {name: stored.pack(processes.fetch(stored.of(x))) for name, (stored, x) in file_tensors.items()}
            if processes.primary():
                save_file(arrays, temporary / file, metadata={"format": "pt"})
        if files.is_sharded:
            metadata = {
                "total_parameters": sum(math.prod(stored.of(x.shape)) for stored, x in tensors.values()),
                **files.metadata,
            }
            write_json(temporary / INDEX, {"metadata": metadata, "weight_map": files.tensor_to_filename})


def _head_tensors(mtp: tuple[MTPConfig, PyTree], embedding: Tensor, policy_layers: int) -> dict[str, Tensor]:
    config, params = mtp
    flat = by_path(params)
    _check_fit("mtp", flat, partial(init_mtp, config))
    tensors = {name: (stored, flat[stored.path]) for name, stored in mtp_tensors(config, policy_layers).items()}
    copy = embedding_copy(config, policy_layers)
    return tensors if copy is None else tensors | {copy: embedding}


def _check_fit(what: str, flat: Mapping[tuple[str, ...], jax.Array], init: Init) -> None:
    abstract = by_path(abstract_params(init))
    for path in sorted(flat.keys() | abstract.keys()):
        actual, expected = (x[path].shape if path in x else None for x in (flat, abstract))
        if actual != expected:
            raise ValueError(f"{what}: {'.'.join(path)} has shape {actual}; must be {expected} according to the config")

"""Adapters in the files of PEFT: `adapter_config.json` and `adapter_model.safetensors`."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from jax.sharding import Mesh

from models.config import DecoderConfig
from models.decoder import init_decoder
from models.files import errors_name, new_directory, optional, read_json, write_json
from models.hf.layout import Stored, stored_tensors
from models.hf.load import check_names, file_views, read_tensors
from models.hf.peft_config import layers_from_peft, layers_to_peft
from models.lora import Adapted, LoraConfig, adapted_layers, init_adapters
from models.params import by_path, fitting_params
from specjax.adapters import KERNEL, A, B
from specjax.parallel import processes
from specjax.types import PyTree

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_WEIGHT = ".weight"


def read_peft(directory: Path, decoder: DecoderConfig) -> list[Adapted]:
    """Return the layers of the policy that have adapters in a PEFT directory, in the order of its parameters.

    Reads only `adapter_config.json`. Raises a one-line ValueError that names the file, the field and its value.
    """
    fields = read_json(directory / CONFIG)
    modules = {stored.path[:-1]: module for module, stored in _modules(decoder).items()}
    layers = adapted_layers(partial(init_decoder, decoder), LoraConfig(rank=1))
    with errors_name(directory / CONFIG):
        return list(layers_from_peft(fields, {modules[layer.path]: layer for layer in layers}).values())


def stated_base(directory: Path) -> str | None:
    """Return the weights that a PEFT directory names as its base, as NAME or NAME@REVISION; None if it names none."""
    fields = read_json(directory / CONFIG)
    name, revision = fields.get("base_model_name_or_path"), fields.get("revision")
    if not isinstance(name, str) or not name:
        return None
    return f"{name}@{revision}" if isinstance(revision, str) and revision else name


def load_adapters(directory: Path, layers: Sequence[Adapted], decoder: DecoderConfig, mesh: Mesh) -> PyTree:
    """Return the adapters of a PEFT directory in float32, sharded over the mesh as `init_adapters` shards them.

    layers: from `read_peft`.

    Raises a one-line ValueError naming the tensor or file: for a missing, unexpected or mis-shaped tensor, a dtype
    that is not supported, a value that is not finite, or a broken file.
    """
    views, tensors = file_views(directory / TENSORS), _adapter_tensors(decoder, layers)
    check_names(directory, views, tensors)
    targets = fitting_params(partial(init_adapters, layers), mesh)
    return read_tensors(directory, views, tensors, targets, "float32")


def save_adapters(
    directory: Path,
    adapters: PyTree,
    layers: Sequence[Adapted],
    decoder: DecoderConfig,
    base: str | None = None,
    revision: str | None = None,
) -> None:
    """Write a PEFT directory, completely or not at all. Each tensor keeps its bits and its dtype.

    base, revision: name or path of the weights that the adapters belong to, and their revision on the hub.

    Raises ValueError if the directory is in use, ImportError without safetensors.
    """
    save_file = optional("safetensors.numpy").save_file
    modules, by_layer = _modules(decoder), {layer.path: layer for layer in layers}
    of_modules = {
        module: by_layer[stored.path[:-1]] for module, stored in modules.items() if stored.path[:-1] in by_layer
    }
    flat = by_path(processes.fetch(adapters))
    tensors = {name: stored.pack(flat[stored.path]) for name, stored in _adapter_tensors(decoder, layers).items()}
    with new_directory(directory) as temporary:
        write_json(temporary / CONFIG, layers_to_peft(of_modules, modules, base, revision))
        if processes.primary():
            save_file(tensors, temporary / TENSORS, metadata={"format": "pt"})


def _modules(decoder: DecoderConfig) -> dict[str, Stored]:
    """Return the weights of a policy's modules by the module's name, layer by layer."""
    tensors = stored_tensors(decoder).items()
    return {name.removesuffix(_WEIGHT): stored for name, stored in tensors if name.endswith(_WEIGHT)}


def _adapter_tensors(decoder: DecoderConfig, layers: Sequence[Adapted]) -> dict[str, Stored]:
    """Return the tensors of an adapter file by name: A as [r, in] and B as [out, r], with flattened heads."""
    inputs, tensors = {layer.path: len(layer.into) for layer in layers}, dict[str, Stored]()
    for module, stored in _modules(decoder).items():
        layer = stored.path[:-1]
        if layer not in inputs or stored.path[-1] != KERNEL:
            continue
        count, (out, into) = inputs[layer], stored.axes
        prefix = f"base_model.model.{module}.lora_"
        tensors[f"{prefix}A{_WEIGHT}"] = Stored((*layer, A), ((count,), into))
        tensors[f"{prefix}B{_WEIGHT}"] = Stored((*layer, B), (tuple(axis - count + 1 for axis in out), (0,)))
    return tensors

"""Loading of Hugging Face safetensors into a sharded parameter tree, parameter by parameter."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from models.config import DecoderConfig, Dtype
from models.decoder import init_decoder
from models.files import check_file, one_line_errors, optional, read_json
from models.hf.layout import EMBEDDING, HEAD, Stored, stored_tensors
from models.hf.mtp_layout import mtp_names
from models.json_fields import show
from models.params import by_path, fitting_params
from specjax.checkpoint_integrity import check_finite
from specjax.types import PyTree

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Dtype of a parameter by the name of the dtype in the file. Nothing computes in float16: float32 holds its values.
DTYPES = {"F32": np.dtype("float32"), "BF16": jnp.dtype("bfloat16"), "F16": np.dtype("float32")}
_ROWS_AT_ONCE = 4096


def load_policy(directory: Path, config: DecoderConfig, mesh: Mesh, param_dtype: Dtype | None = None) -> PyTree:
    """Load the parameters of `Decoder(config)` from a Hugging Face directory, sharded over the mesh by logical axes.

    Reads `model.safetensors`, or the files of `model.safetensors.index.json`. Each device's shard is read separately:
    the host never holds more than one tensor, or one device's experts of a layer. An MTP head in the same files is
    ignored; `models.hf.drafts.mtp` loads it.

    Args:
        directory: directory of the checkpoint.
        config: config of the policy, from `read_hf_config`.
        mesh: mesh for the parameters.
        param_dtype: dtype to convert to; by default every tensor keeps the dtype of the file, but float16 becomes
            float32.

    Raises a one-line ValueError naming the tensor or file: for a missing, unexpected or mis-shaped tensor, a dtype
    outside DTYPES, a value that is not finite, an `lm_head.weight` that differs from its tied
    embedding, or a broken file. Raises ImportError without safetensors.
    """
    views = open_tensors(directory)
    for names in mtp_names(views, config.num_layers).values():
        for name in names:
            del views[name]
    tensors = stored_tensors(config)
    tied = views.pop(HEAD, None) if config.tie_embeddings else None
    check_names(directory, views, tensors)
    if tied is not None:
        check_repeats(tied, views[EMBEDDING], f"{HEAD}: differs from {EMBEDDING}, but tie_word_embeddings = true")
    return read_tensors(directory, views, tensors, fitting_params(partial(init_decoder, config), mesh), param_dtype)


def has_own_head(directory: Path) -> bool:
    """Return whether the files hold an `lm_head.weight` that differs from the embedding. Then nothing ties the two."""
    views = open_tensors(directory)
    return HEAD in views and EMBEDDING in views and not _equal(views[HEAD], views[EMBEDDING])


def read_tensors(
    directory: Path,
    views: Mapping[str, Any],
    tensors: Mapping[str, Stored],
    targets: PyTree,
    param_dtype: Dtype | None,
    dtypes: Mapping[str, np.dtype] = DTYPES,
) -> PyTree:
    """Read a parameter tree from lazy views, with the shapes and shardings of `targets`. See `load_policy` for errors.

    directory: of the files, for errors. dtypes: of parameters, by safetensors' name of the dtype in the file.
    """
    flat, parts = by_path(targets), dict[tuple[str, ...], list[tuple[str, Stored]]]()
    for name, stored in tensors.items():
        parts.setdefault(stored.path, []).append((name, stored))
    parameters, by_name = {}, {}
    for path, members in parts.items():
        members.sort(key=lambda item: item[1].place or 0)
        names_by_dtype = {views[name].get_dtype(): name for name, _ in members}
        for unknown in names_by_dtype.keys() - dtypes.keys():
            raise ValueError(f"{names_by_dtype[unknown]}: dtype {unknown}; must be {' or '.join(dtypes)}")
        if len(names_by_dtype) > 1:
            (one, first), (other, second) = list(names_by_dtype.items())[:2]
            raise ValueError(f"{second}: dtype {other}; must be {one}, like {first}")
        dtype = jnp.dtype(param_dtype) if param_dtype else dtypes[next(iter(names_by_dtype))]
        name = members[0][0] if len(members) == 1 else ".".join(path)
        parameters[path] = by_name[name] = _read_parameter(views, members, flat[path], dtype)
    check_finite(by_name, directory)
    return flax.traverse_util.unflatten_dict(parameters)


def _read_parameter(
    views: Mapping[str, Any], members: Sequence[tuple[str, Stored]], target: jax.ShapeDtypeStruct, dtype: np.dtype
) -> jax.Array:
    """Read a parameter from its tensor, or from those that it stacks, in their order."""
    shape = target.shape
    for name, stored in members:
        actual, expected = tuple(views[name].get_shape()), stored.shape(stored.of(shape))
        if actual != expected:
            raise ValueError(f"{name}: has shape {actual} in the file; must be {expected} according to its config")

    def tensor(name: str, stored: Stored, index: tuple[slice, ...]) -> np.ndarray:
        index, full_shape = stored.of(index), stored.of(shape)
        local = [len(range(*cut.indices(size))) for cut, size in zip(index, full_shape, strict=True)]
        return stored.unpack(views[name][stored.index(index, full_shape)], local).astype(dtype, copy=False)

    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None  # None only occurs in jax's annotation
        if members[0][1].place is None:
            return tensor(*members[0], index)
        return np.stack([tensor(*member, index) for member in members[index[0]]])

    # Wait: otherwise the host holds several tensors if transfers to the device are slower than reading.
    return jax.make_array_from_callback(shape, target.sharding, shard, dtype=dtype).block_until_ready()


def open_tensors(directory: Path) -> dict[str, Any]:
    """Return lazy views of all tensors by name, except those for which `follows_from_config` is true.

    Views keep their files mapped.
    """
    if (directory / SINGLE).exists():
        return file_views(directory / SINGLE)
    if not (directory / INDEX).exists():
        raise ValueError(f"{directory}: must hold {SINGLE} or {INDEX}")
    weight_map = read_json(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{directory / INDEX}: weight_map = {show(weight_map)}: must be an object of file names")
    for name, file in weight_map.items():
        if not isinstance(file, str) or file != Path(file).name or "\\" in file:
            raise ValueError(
                f"{directory / INDEX}: weight_map.{name} = {show(file)}: must be a file in the same directory"
            )
    views: dict[str, Any] = {}
    for file in sorted(set(weight_map.values())):
        for name, view in file_views(directory / file).items():
            if weight_map.get(name) != file:
                raise ValueError(f"{name}: is in {file}, but {INDEX} names {weight_map.get(name, 'no file for it')}")
            views[name] = view
    return views


def file_views(path: Path) -> dict[str, Any]:
    """Return lazy views like `open_tensors`, for one safetensors file."""
    safetensors = optional("safetensors")
    check_file(path)
    with one_line_errors(f"{path}: not a safetensors file, or cut short"):
        file = safetensors.safe_open(path, framework="numpy")
    return {name: file.get_slice(name) for name in file.keys() if not follows_from_config(name)}


def follows_from_config(name: str) -> bool:
    """Return whether the tensor is a rotary table of old checkpoints, which the config determines and nothing reads."""
    return name.endswith(".rotary_emb.inv_freq")


def check_names(directory: Path, actual: Collection[str], expected: Collection[str]) -> None:
    """Raise ValueError naming the first tensor that is missing or unexpected."""

    def refuse(names: Iterable[str], what: str) -> None:
        if names := sorted(names):
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise ValueError(f"{names[0]}: {what} {directory}{more}")

    refuse(set(expected) - set(actual), "missing from")
    refuse(set(actual) - set(expected), "unexpected in")


def row_slices(count: int) -> Iterator[slice]:
    """Cut `count` rows of a tensor into slices that the host can hold."""
    for start in range(0, count, _ROWS_AT_ONCE):
        yield slice(start, min(start + _ROWS_AT_ONCE, count))


def check_repeats(copy: Any, original: Any, message: str) -> None:
    """Raise ValueError with this message unless both views are equal bit for bit."""
    if not _equal(copy, original):
        raise ValueError(message)


def _equal(copy: Any, original: Any) -> bool:
    alike = (copy.get_shape(), copy.get_dtype()) == (original.get_shape(), original.get_dtype())
    return alike and all(copy[rows].tobytes() == original[rows].tobytes() for rows in row_slices(copy.get_shape()[0]))

"""EAGLE-3 heads in the directories that SafeAILab, SpecForge and speculators publish, in and out.

The layers that a head reads, its rotary embedding and its length are what its own `config.json` says, never the
policy's. What it borrows of the policy, the embedding, may be there as a copy, which is not loaded.
"""

import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from models.config import Dtype
from models.draft_checkpoint import SavedDraft, check_target_ids
from models.eagle3 import Eagle3Config, init_eagle3
from models.eagle3_dialects import Described, Dialect, config_from_public, config_to_public, dialect_of
from models.eagle3_layout import EMBEDDING, TO_DRAFT, TO_TARGET, eagle3_tensors
from models.files import errors_name, new_directory, optional, read_json, write_json
from models.hf_import import DTYPES, INDEX, SINGLE, check_names, open_tensors, read_tensors
from models.params import abstract_params, by_path

TORCH = "pytorch_model.bin"
_DTYPES = {**DTYPES, "F16": np.dtype("float16")}
_ROWS_COMPARED_AT_ONCE = 4096


def load_eagle3(directory: Path, mesh: Mesh, param_dtype: Dtype | None = None) -> SavedDraft:
    """The head in a directory of either dialect, sharded over the mesh.

    Reads safetensors, or `pytorch_model.bin` where torch is installed. By default every tensor keeps its dtype.

    Raises ValueError with one line naming the field or tensor: for a config that is not implemented, a missing,
    unexpected or mis-shaped tensor, a map of the vocabulary that is none. Raises ImportError without safetensors.
    """
    path = directory / "config.json"
    fields = read_json(path)
    with errors_name(path):
        described, dialect = config_from_public(fields), dialect_of(fields)
    assert dialect is not None
    config = described.config
    with _open(directory) as views:
        tensors = eagle3_tensors(config, dialect)
        vocabulary = {name: views.pop(name)[:] for name in (TO_TARGET, TO_DRAFT) if name in views}
        views.pop(EMBEDDING, None)
        check_names(directory, views, tensors)
        with errors_name(directory):
            ids = _target_ids(vocabulary, config)
        targets = abstract_params(partial(init_eagle3, config), mesh)
        params = read_tensors(views, tensors, targets, param_dtype, _DTYPES)
    return SavedDraft(config, params, ids, described.feature_layers)


def save_eagle3(
    directory: Path,
    draft: SavedDraft,
    dialect: Dialect,
    source: Mapping[str, Any] | None = None,
    verifier: str | None = None,
) -> None:
    """Write a head in the layout that vLLM and SGLang load, all of it or nothing.

    Every tensor keeps its bits and its dtype.

    Args:
        source: the `config.json` that the head came with. It is written as it was where it is of this dialect and still
            describes the head.
        verifier: the policy's name or path, which speculators' files state.

    Raises ValueError where the directory is in use, or the dialect has no word for what the head is. Raises ImportError
    without safetensors.
    """
    save_file = optional("safetensors.numpy").save_file
    flat = by_path(draft.params)
    config = replace(draft.config, param_dtype=_nearest(flat["head", "kernel"].dtype))
    check_target_ids(draft.target_ids, config)
    tensors = {
        name: stored.pack(np.asarray(flat[stored.path])) for name, stored in eagle3_tensors(config, dialect).items()
    }
    if draft.target_ids is not None:
        ids = draft.target_ids.astype(np.int64)
        tensors[TO_TARGET] = ids - np.arange(len(ids))
        tensors[TO_DRAFT] = np.isin(np.arange(config.vocab_size), ids)
    described = Described(config, draft.feature_layers)
    with new_directory(directory) as temporary:
        if source is not None and dialect_of(source) == dialect and _describes(source, described):
            write_json(temporary / "config.json", dict(source))
        else:
            write_json(temporary / "config.json", config_to_public(described, dialect, verifier))
        save_file(tensors, temporary / SINGLE, metadata={"format": "pt"})


def has_embedding(directory: Path) -> bool:
    """Whether the head brings a copy of the policy's embedding."""
    with _open(directory) as views:
        return EMBEDDING in views


def check_embedding(directory: Path, table: jax.Array) -> None:
    """Raises ValueError where the head brings a copy of the policy's embedding [V, D] that is not, to rounding, it."""
    with _open(directory) as views:
        copy = views.get(EMBEDDING)
        if copy is None:
            return
        same = tuple(copy.get_shape()) == table.shape
        for start in range(0, len(table), _ROWS_COMPARED_AT_ONCE) if same else ():
            rows = slice(start, min(start + _ROWS_COMPARED_AT_ONCE, len(table)))
            ours, theirs = (np.asarray(x[rows]).astype(np.float32) for x in (table, copy))
            same = same and np.allclose(ours, theirs, rtol=2**-7, atol=1e-6)
        if not same:
            raise ValueError(f"{EMBEDDING}: not the policy's, which the head borrows: made for another policy")


def _describes(source: Mapping[str, Any], described: Described) -> bool:
    found = config_from_public(source)
    config = replace(found.config, dtype=described.config.dtype, param_dtype=described.config.param_dtype)
    return replace(found, config=config) == described


def _target_ids(tensors: Mapping[str, np.ndarray], config: Eagle3Config) -> np.ndarray | None:
    """From draft ids to the policy's: `d2t` is how much larger these are, `t2d` which of the policy's are there."""
    offsets, there = tensors.get(TO_TARGET), tensors.get(TO_DRAFT)
    if offsets is None:
        if there is not None:
            raise ValueError(f"{TO_DRAFT}: there without {TO_TARGET}")
        whole = config.draft_vocab_size == config.vocab_size
        return None if whole else np.arange(config.draft_vocab_size, dtype=np.int32)
    if offsets.shape != (config.draft_vocab_size,) or not np.issubdtype(offsets.dtype, np.integer):
        wanted = f"int64 ({config.draft_vocab_size},)"
        raise ValueError(f"{TO_TARGET}: {offsets.dtype} {offsets.shape}, must be {wanted}")
    ids = np.arange(len(offsets)) + offsets
    with errors_name(Path(TO_TARGET)):
        check_target_ids(ids, config)
    if there is not None and not np.array_equal(there, np.isin(np.arange(config.vocab_size), ids)):
        raise ValueError(f"{TO_DRAFT}: not the {config.vocab_size} flags of the ids that {TO_TARGET} gives")
    return ids.astype(np.int32)


def _nearest(dtype: np.dtype) -> Dtype:
    return "bfloat16" if dtype == jnp.bfloat16 else "float32"


@contextmanager
def _open(directory: Path) -> Iterator[dict[str, Any]]:
    """Lazy views of all tensors by name."""
    if (directory / TORCH).exists() and not any((directory / name).exists() for name in (SINGLE, INDEX)):
        yield _torch_views(directory / TORCH)
        return
    with ExitStack() as stack:
        yield open_tensors(directory, stack)


@dataclass(frozen=True)
class _View:
    """A tensor in memory, with the methods of safetensors' lazy ones."""

    tensor: np.ndarray

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        names = {dtype: name for name, dtype in _DTYPES.items()}
        return names.get(self.tensor.dtype, self.tensor.dtype.name)

    def __getitem__(self, index: Any) -> np.ndarray:
        return self.tensor[index]


def _torch_views(path: Path) -> dict[str, _View]:
    try:
        torch = optional("torch")
    except ImportError as error:
        raise ImportError(f"{path}: torch is not installed, which alone reads it; or convert it to {SINGLE}") from error

    def array(tensor: Any) -> np.ndarray:
        if tensor.dtype == torch.bfloat16:
            return tensor.view(torch.int16).numpy().view(jnp.bfloat16)
        return tensor.numpy()

    try:
        # Mapped where the file is of the kind that can be: then it is read once, whatever the times it is opened.
        tensors = torch.load(str(path), map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
        return {name: _View(array(tensor)) for name, tensor in tensors.items()}
    except Exception as error:  # torch raises a different kind, some of many lines, for each way to be broken
        reason = (str(error) or type(error).__name__).splitlines()[0][:120]
        raise ValueError(f"{path}: not a file of tensors, or cut short ({reason})") from error

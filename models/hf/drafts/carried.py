"""Tensors in a draft's files that are no parameters of it: vocabulary maps, and copies of the policy's tables.

A conversion to our layout carries them in a file beside the draft, for an export back. A copy of an embedding shows
which policy the draft was made for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from models.config import DecoderConfig, Dtype
from models.drafts.block import BlockConfig
from models.drafts.eagle3 import Eagle3Config
from models.files import CARRIED_TENSORS, optional
from models.hf.drafts.vocabulary import TO_DRAFT, TO_TARGET
from models.hf.layout import HEAD
from models.hf.load import DTYPES, INDEX, SINGLE, file_views, open_tensors, row_slices
from models.hf.torch_files import torch_views
from models.params import by_path
from specjax.parallel import processes
from specjax.types import PyTree

TORCH = "pytorch_model.bin"
DRAFT_DTYPES = {**DTYPES, "F16": np.dtype("float16")}
EMBEDDING = "embed_tokens.weight"
# Least mean cosine between a copied table's rows and the policy's. RL moves rows far less; unrelated ones are at 0.
_LEAST_COSINE = 0.9


@dataclass(frozen=True)
class PolicyTable:
    """The policy's embedding or vocabulary head, of which a draft's files may hold a copy [V, D].

    Attributes:
        array:      [V, D].
        transposed: It is [D, V] instead.
    """

    array: jax.Array
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Return (V, D)."""
        return self.array.shape[::-1] if self.transposed else self.array.shape

    def rows(self, rows: slice) -> np.ndarray:
        """Return these rows of [V, D]."""
        if self.transposed:
            return processes.fetch(self.array[:, rows]).T
        return processes.fetch(self.array[rows])


def policy_tables(policy: DecoderConfig, weights: PyTree) -> dict[str, PolicyTable]:
    """Return the tables of the policy with these weights, by the names of their copies in a draft's files."""
    flat = by_path(weights)
    embedding = PolicyTable(flat["embed", "embedding"])
    head = embedding if policy.tie_embeddings else PolicyTable(flat["head", "kernel"], transposed=True)
    return {EMBEDDING: embedding, HEAD: head}


def copied_tables(config: BlockConfig | Eagle3Config) -> tuple[str, ...]:
    """Return the names of the policy's tables that this draft reads, of which its files may hold copies."""
    return (EMBEDDING,) if config.own_head else (EMBEDDING, HEAD)


def copies(tables: Mapping[str, PolicyTable], dtype: Dtype) -> dict[str, np.ndarray]:
    """Return copies of tables of the policy, to write into a draft's files."""
    return {name: np.ascontiguousarray(table.rows(slice(None)).astype(dtype)) for name, table in tables.items()}


def check_copies(directory: Path, tables: Mapping[str, PolicyTable]) -> None:
    """Raise ValueError if the draft's files hold a copy of another policy's table than one of these.

    A policy trained since then passes: its rows have nearly kept their directions.
    """
    views = open_draft(directory)
    for name, table in tables.items():
        if (copy := views.get(name)) is None:
            continue
        same_shape = tuple(copy.get_shape()) == table.shape
        if not (same_shape and _mean_cosine(copy, table) >= _LEAST_COSINE):
            raise ValueError(f"{name}: differs from the policy's, so the draft was made for another policy")


def carried_tensors(
    directory: Path, param_dtype: Dtype | None = None, tables: Sequence[str] = (EMBEDDING,)
) -> dict[str, np.ndarray] | None:
    """Read a draft's original tensors that are not parameters: vocabulary maps, and copies of these `tables`.

    They come from a public directory, or from the file that `write_carried` wrote into one of ours. None for a draft
    that was made here. The maps keep their dtype, and by default so do copies of the policy's tables.
    """
    if _is_ours(directory) and not (directory / CARRIED_TENSORS).exists():
        return None
    views = open_draft(directory)
    tensors = {name: views[name][:] for name in (TO_TARGET, TO_DRAFT, *tables) if name in views}
    if param_dtype is not None:
        tensors |= {name: tensors[name].astype(param_dtype) for name in tables if name in tensors}
    return tensors


def write_carried(directory: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write the tensors of `carried_tensors` into a directory in our format, for a later export."""
    if processes.primary():
        optional("safetensors.numpy").save_file(dict(tensors), directory / CARRIED_TENSORS)


def open_draft(directory: Path) -> dict[str, Any]:
    """Return lazy views by name: all tensors of a public directory, or the carried ones of a directory of ours."""
    if _is_ours(directory):
        carried = directory / CARRIED_TENSORS
        return file_views(carried) if carried.exists() else {}
    if (directory / TORCH).exists() and not any((directory / name).exists() for name in (SINGLE, INDEX)):
        return torch_views(directory / TORCH, DRAFT_DTYPES)
    return open_tensors(directory)


def _is_ours(directory: Path) -> bool:
    return (directory / "params").is_dir()


def _mean_cosine(copy: Any, table: PolicyTable) -> float:
    """Return the mean cosine between rows of a view and of a table, both [V, D]. Two rows of zeros count as equal."""
    total, count = 0.0, table.shape[0]
    for rows in row_slices(count):
        ours, theirs = (np.array(x, np.float32) for x in (table.rows(rows), copy[rows]))
        norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
        cosines = np.sum(ours * theirs, axis=1) / np.where(norms > 0, norms, 1)
        total += float(np.sum(np.where(ours.any(axis=1) | theirs.any(axis=1), cosines, 1)))
    return total / count

"""Checks of a checkpoint: sizes and checksums of its files before it is restored, finite parameters after.

Orbax alone reports missing or truncated files late, from many threads and in hundreds of lines. A parameter that is not
finite makes every logit NaN, of which sampling makes token 0.
"""

import json
import shutil
import zlib
from collections.abc import Collection
from pathlib import Path

import jax
import jax.numpy as jnp

from specjax.parallel import processes
from specjax.types import PyTree

MANIFEST = "files.json"
CHUNK_BYTES = 2**24


class DamagedSave(ValueError):
    """Error for a checkpoint whose files changed after they were written. The message names the first such file."""


def check_finite(params: PyTree, source: Path | str) -> None:
    """Raise ValueError naming the first parameter that holds NaN or infinity. source: where they come from.

    The parameters may be sharded: one compiled program reads them once and returns a count for each.
    """
    floats = {
        jax.tree_util.keystr(path, simple=True, separator="."): x
        for path, x in jax.tree.leaves_with_path(params)
        if jnp.issubdtype(x.dtype, jnp.inexact)
    }
    counts = processes.fetch(_not_finite(list(floats.values())))
    for (name, x), count in zip(floats.items(), counts, strict=True):
        if count:
            raise ValueError(f"{source}: {name}: {count} of {x.size} values are nan or inf; all must be finite")


@jax.jit
def _not_finite(arrays: list[jax.Array]) -> list[jax.Array]:
    return [jnp.sum(~jnp.isfinite(x), dtype=jnp.int32) for x in arrays]


def fingerprint(params: PyTree) -> str:
    """Return a hash of the names and bits of all arrays, 8 hexadecimal digits; the same on every mesh."""
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree.leaves_with_path(params)]
    sums = processes.fetch(_bit_sums(jax.tree.leaves(params)))
    return f"{zlib.crc32(repr([*zip(names, map(int, sums), strict=True)]).encode()):08x}"


@jax.jit
def _bit_sums(arrays: list[jax.Array]) -> list[jax.Array]:
    """Return a sum over the bits of each array, in which every position has its own odd weight, modulo 2**32."""

    def weighted(x: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).astype(jnp.uint32)
        weight = jnp.uint32(1)
        for axis, size in enumerate(x.shape):
            along = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
            weight = weight * jnp.uint32(size) + along
        return jnp.sum(bits * (2 * weight + 1), dtype=jnp.uint32)

    return [weighted(x) for x in arrays]


def write_manifest(checkpoint: Path) -> None:
    """Write the manifest of a checkpoint: {relative path: [bytes, CRC-32]} as JSON.

    Must run before the checkpoint gets its final name, so that no complete one is without a manifest.
    """
    listed = {name: [path.stat().st_size, _checksum(path)] for name, path in _files(checkpoint).items()}
    (checkpoint / MANIFEST).write_text(json.dumps(listed), encoding="utf-8")


def check_manifest(checkpoint: Path, items: Collection[str] | None = None) -> None:
    """Raise DamagedSave if a listed file is missing or has another size or checksum. items: check only these.

    So do pipes and devices among the files: reading them may never end.
    """
    for path in checkpoint.rglob("*"):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise DamagedSave(f"{checkpoint} is damaged: {path.relative_to(checkpoint)} is no regular file")
    try:
        listed = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        expected = {name: (int(size), int(checksum)) for name, (size, checksum) in listed.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        raise DamagedSave(f"{checkpoint} is damaged: {MANIFEST} is missing or unreadable") from None
    found = _files(checkpoint)
    for name, (size, checksum) in expected.items():
        if items is not None and name.partition("/")[0] not in items:
            continue
        if name not in found:
            raise DamagedSave(f"{checkpoint} is damaged: {name} is missing")
        found_size = found[name].stat().st_size
        if found_size != size:
            raise DamagedSave(f"{checkpoint} is damaged: {name} has {found_size} bytes, expected {size}")
        if _checksum(found[name]) != checksum:
            raise DamagedSave(f"{checkpoint} is damaged: {name} does not match its checksum")


def saved_steps(directory: Path) -> list[int]:
    """Return the steps of all checkpoints in a directory, damaged or not, ascending. Empty if there is no directory."""
    return sorted(int(path.name) for path in directory.glob("*") if path.name.isdecimal() and path.is_dir())


def set_damaged_aside(directory: Path) -> list[str]:
    """Rename the damaged checkpoints that are newer than the newest intact one. Return one line for each.

    The intact one is then the newest, and a run that resumes from it writes the renamed steps again. Older damaged
    checkpoints keep their names: they may be half deleted by a killed process, and the next writer deletes the rest.
    Raises DamagedSave and renames nothing if no checkpoint is intact. Does nothing without checkpoints.
    """
    damaged: dict[int, str] = {}
    for step in reversed(saved_steps(directory)):
        try:
            check_manifest(directory / str(step))
            break
        except DamagedSave as error:
            damaged[step] = str(error)
    else:
        if damaged:
            raise DamagedSave(f"{damaged[max(damaged)]}; none of {len(damaged)} checkpoints is intact")
    for step in damaged:
        aside = directory / f"{step}.damaged"
        shutil.rmtree(aside, ignore_errors=True)  # an earlier damaged checkpoint of the same step
        (directory / str(step)).rename(aside)
    return [f"{message}; renamed to {step}.damaged" for step, message in damaged.items()]


def _files(checkpoint: Path) -> dict[str, Path]:
    """Return the files of a checkpoint's items by relative path.

    Leaves out Orbax's own files at the top level: it still writes to them, and restores without them.
    """
    files = (path for path in sorted(checkpoint.glob("*/**/*")) if path.is_file())
    return {path.relative_to(checkpoint).as_posix(): path for path in files}


def _checksum(path: Path) -> int:
    """Return the CRC-32 of a file, read in chunks."""
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return value

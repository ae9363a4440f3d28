"""Manifest of a checkpoint: sizes and checksums of its files, checked before anything is restored.

Orbax alone reports missing or truncated files late, from many threads and in hundreds of lines.
"""

import json
import shutil
import zlib
from collections.abc import Collection
from pathlib import Path

MANIFEST = "files.json"
CHUNK_BYTES = 2**24


class DamagedSave(ValueError):
    """Error for a checkpoint whose files changed after they were written. The message names the first such file."""


def write_manifest(checkpoint: Path) -> None:
    """Write the manifest of a checkpoint: {relative path: [bytes, CRC-32]} as JSON.

    Must run before the checkpoint gets its final name, so that no complete one is without a manifest.
    """
    listed = {name: [path.stat().st_size, _checksum(path)] for name, path in _files(checkpoint).items()}
    (checkpoint / MANIFEST).write_text(json.dumps(listed), encoding="utf-8")


def check_manifest(checkpoint: Path, items: Collection[str] | None = None) -> None:
    """Raise DamagedSave if a listed file is missing or has another size or checksum. items: check only these."""
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

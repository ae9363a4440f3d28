"""Manifest of a checkpoint's files, with sizes and checksums, checked before anything is restored.

Orbax reports missing or truncated files late, from many threads and in hundreds of lines.
"""

import json
import shutil
import zlib
from collections.abc import Collection
from pathlib import Path

MANIFEST = "files.json"
PART = 2**24  # bytes


class DamagedSave(ValueError):
    """Raised for a checkpoint whose files are not those that were written. The message names the first such file."""


def write_manifest(save: Path) -> None:
    """Write the manifest of a checkpoint. Called before it gets its final name."""
    listed = {name: [path.stat().st_size, _checksum(path)] for name, path in _files(save).items()}
    (save / MANIFEST).write_text(json.dumps(listed), encoding="utf-8")


def check_manifest(save: Path, items: Collection[str] | None = None) -> None:
    """Raise DamagedSave if a file of these items (None: of all) is missing or not as the manifest lists it."""
    try:
        listed = json.loads((save / MANIFEST).read_text(encoding="utf-8"))
        expected = {name: (int(size), int(checksum)) for name, (size, checksum) in listed.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        raise DamagedSave(f"{save} is damaged: {MANIFEST} is gone or garbled") from None
    found = _files(save)
    for name, (size, checksum) in expected.items():
        if items is not None and name.partition("/")[0] not in items:
            continue
        if name not in found:
            raise DamagedSave(f"{save} is damaged: {name} is gone")
        found_size = found[name].stat().st_size
        if found_size != size:
            raise DamagedSave(f"{save} is damaged: {name} has {found_size} bytes of {size}")
        if _checksum(found[name]) != checksum:
            raise DamagedSave(f"{save} is damaged: {name} does not hold what was written")


def saved_steps(directory: Path) -> list[int]:
    """Return the steps of all checkpoints in a directory, damaged or not, ascending. Empty without the directory."""
    return sorted(int(path.name) for path in directory.glob("*") if path.name.isdecimal() and path.is_dir())


def set_damaged_aside(directory: Path) -> list[str]:
    """Rename the damaged checkpoints that are newer than the newest intact one, which thereby becomes the newest.

    A run that resumes from it saves their steps again. Older damaged ones stay: a process that was killed while
    deleting them may have left them so, and the next one finishes the deletion. Returns one line per renamed
    checkpoint. Raises DamagedSave, and renames nothing, if no checkpoint is intact.
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
            raise DamagedSave(f"{damaged[max(damaged)]}; none of {len(damaged)} saves is whole")
    for step in damaged:
        aside = directory / f"{step}.damaged"
        shutil.rmtree(aside, ignore_errors=True)  # an earlier damaged checkpoint of the same step
        (directory / str(step)).rename(aside)
    return [f"{message}; it is now {step}.damaged" for step, message in damaged.items()]


def _files(save: Path) -> dict[str, Path]:
    """Return the files of a checkpoint's items by relative path.

    Orbax's own files at the top level are left out: it still writes to them, and restores without them.
    """
    return {path.relative_to(save).as_posix(): path for path in sorted(save.glob("*/**/*")) if path.is_file()}


def _checksum(path: Path) -> int:
    """Return the CRC-32 of a file, read in parts."""
    value = 0
    with path.open("rb") as file:
        while part := file.read(PART):
            value = zlib.crc32(part, value)
    return value

"""The list of a save's files, by which it is known to be whole before any of it is read.

Orbax finds out late what is gone or cut off, in many threads and hundreds of lines.
"""

import json
import shutil
import zlib
from collections.abc import Collection
from pathlib import Path

MANIFEST = "files.json"
PART = 2**24  # bytes


class DamagedSave(ValueError):
    """A save whose files are not those that were written. The message is one line that names it and the first."""


def write_manifest(save: Path) -> None:
    """List the files of a save, with their sizes and checksums. Called before the save gets its name."""
    listed = {name: [path.stat().st_size, _checksum(path)] for name, path in _files(save).items()}
    (save / MANIFEST).write_text(json.dumps(listed), encoding="utf-8")


def check_manifest(save: Path, items: Collection[str] | None = None) -> None:
    """Raise DamagedSave unless the files of a save are there, and hold what they held: of these items, or of all."""
    try:
        listed = json.loads((save / MANIFEST).read_text(encoding="utf-8"))
        whole = {name: (int(size), int(checksum)) for name, (size, checksum) in listed.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        raise DamagedSave(f"{save} is damaged: {MANIFEST} is gone or garbled") from None
    found = _files(save)
    for name, (size, checksum) in whole.items():
        if items is not None and name.partition("/")[0] not in items:
            continue
        if name not in found:
            raise DamagedSave(f"{save} is damaged: {name} is gone")
        there = found[name].stat().st_size
        if there != size:
            raise DamagedSave(f"{save} is damaged: {name} has {there} bytes of {size}")
        if _checksum(found[name]) != checksum:
            raise DamagedSave(f"{save} is damaged: {name} does not hold what was written")


def saved_steps(directory: Path) -> list[int]:
    """The steps that are saved in a directory, ascending, damaged or not; none where there is no such directory."""
    return sorted(int(path.name) for path in directory.glob("*") if path.name.isdecimal() and path.is_dir())


def set_damaged_aside(directory: Path) -> list[str]:
    """Rename the damaged saves that are newer than the newest whole one, so that this is the newest of all.

    A run that goes on from there saves their steps again. Older ones stay: they may be half swept by a process that was
    killed, and are swept by the next. Returns a line for each that is renamed, and raises DamagedSave where no save is
    whole: then none is.
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
        shutil.rmtree(aside, ignore_errors=True)  # of the same step, from another time
        (directory / str(step)).rename(aside)
    return [f"{said}; it is now {step}.damaged" for step, said in damaged.items()]


def _files(save: Path) -> dict[str, Path]:
    """Return the files of its items. Orbax still writes to the notes beside them, and restores without these."""
    return {path.relative_to(save).as_posix(): path for path in sorted(save.glob("*/**/*")) if path.is_file()}


def _checksum(path: Path) -> int:
    """CRC-32 of what it holds, read a part at a time."""
    value = 0
    with path.open("rb") as file:
        while part := file.read(PART):
            value = zlib.crc32(part, value)
    return value

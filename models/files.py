"""Helpers for import and export: JSON files, directories written atomically, optional packages."""

import importlib
import json
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specjax.parallel import processes

# Stored beside a converted public draft, for the export back: its config.json, and tensors that are no parameters.
CARRIED, CARRIED_TENSORS = "huggingface.json", "huggingface.safetensors"

# Bytes. The indices of the largest published models take less than a tenth of it.
_LARGEST_JSON = 2**26
# Levels of nesting. Published files have fewer than ten; readers that descend have a limit of a thousand.
_DEEPEST_JSON = 64


def optional(module: str) -> Any:
    """Import a module of the [hf] extra. Raises a one-line ImportError if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{module} is not installed: pip install -e '.[hf]' in a clone") from error


def check_file(path: Path) -> None:
    """Raise ValueError unless the path is a regular file or a link to one. Opening a pipe or a device may never end."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path}: must be a regular file")


def check_tree(directory: Path) -> None:
    """Raise ValueError unless everything below the directory is a regular file or a directory."""
    for path in directory.rglob("*"):
        if not path.is_dir():
            check_file(path)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ValueError naming the file if it is missing, too large, too deep or not an object.

    So do keys that an object has twice: readers differ in which of them counts.
    """
    check_file(path)
    if (size := path.stat().st_size) > _LARGEST_JSON:
        raise ValueError(f"{path}: has {size} bytes; must have at most {_LARGEST_JSON}")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=object_of_pairs)
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not JSON ({error})"
        raise ValueError(f"{path}: {reason}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: must hold a JSON object")
    level: list[Any] = [fields]
    for _ in range(_DEEPEST_JSON):
        level = [value for each in level for value in (each.values() if isinstance(each, dict) else each)]
        level = [value for value in level if isinstance(value, dict | list)]
    if level:
        raise ValueError(f"{path}: must have at most {_DEEPEST_JSON} levels of nesting")
    return fields


def object_of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, for json.loads. Raises ValueError for a key that stands twice in it."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(name for name in names if names.count(name) > 1)!r} stands twice in an object")
    return fields


@contextmanager
def errors_name(place: Path | str) -> Iterator[None]:
    """Put the path, or the field, before the message of every ValueError that the block raises."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


@contextmanager
def one_line_errors(message: str) -> Iterator[None]:
    """Turn every exception of the block into a one-line ValueError: the message and the reason in parentheses."""
    try:
        yield
    except Exception as error:  # each library and fault raises its own type, some with many lines
        reason = (str(error) or type(error).__name__).splitlines()[0][:120]
        raise ValueError(f"{message} ({reason})") from error


def write_json(path: Path, fields: dict[str, Any]) -> None:
    """Write a JSON object, only in the primary process."""
    if processes.primary():
        path.write_text(json_text(fields), encoding="utf-8")


def json_text(fields: dict[str, Any]) -> str:
    """Return fields as JSON text: indented, keys sorted, newline at the end."""
    return json.dumps(fields, indent=2, sort_keys=True) + "\n"


def write_atomically(path: Path, contents: str | bytes) -> None:
    """Replace a file atomically: a reader sees the old contents or the new, even if this process is killed.

    Only the primary process writes.
    """
    if processes.primary():
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_bytes(contents.encode() if isinstance(contents, str) else contents)
        os.replace(temporary, path)


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling to fill. It is renamed to `path` when the block ends and removed if the block raises.

    Every process gets the same one. Raises ValueError if `path` exists and is not an empty directory.
    """

    def make() -> str:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ValueError(f"{path}: exists and is not an empty directory")
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        temporary.mkdir()
        return str(temporary)

    temporary = Path(processes.on_primary(make))

    def finish() -> None:
        # safetensors lets no other user read its files.
        for file in temporary.rglob("*"):
            if file.is_file():
                file.chmod(temporary.stat().st_mode & 0o666)
        os.replace(temporary, path)

    try:
        yield temporary
        processes.on_primary(finish)
    except BaseException:
        if processes.primary():
            shutil.rmtree(temporary, ignore_errors=True)  # its writer's threads may go on after an error
        raise

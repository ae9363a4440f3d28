"""Files for import and export: JSON objects, directories that appear whole, optional packages."""

import importlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Beside what we made of a public checkpoint: fields of its config.json and, of a draft, tensors, for the way back.
CARRIED, CARRIED_TENSORS = "huggingface.json", "huggingface.safetensors"


def optional(module: str) -> Any:
    """A module of the [hf] extra. Raises ImportError with one clear line where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{module} is not installed: pip install 'specjax[hf]'") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ValueError naming the file where it is missing or something else."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not JSON ({error})"
        raise ValueError(f"{path}: {reason}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path}: must hold a JSON object")
    return fields


@contextmanager
def errors_name(place: Path | str) -> Iterator[None]:
    """Puts the path, or the field, before the message of every ValueError that the block raises."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


@contextmanager
def one_line_errors(message: str) -> Iterator[None]:
    """Turn every exception of a library that reads a broken file into a ValueError: the message, and why, in a line."""
    try:
        yield
    except Exception as error:  # a different kind for each way to be broken, some of many lines
        reason = (str(error) or type(error).__name__).splitlines()[0][:120]
        raise ValueError(f"{message} ({reason})") from error


def write_json(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json_text(fields), encoding="utf-8")


def json_text(fields: dict[str, Any]) -> str:
    """As `write_json` writes it."""
    return json.dumps(fields, indent=2, sort_keys=True) + "\n"


def write_atomically(path: Path, text: str) -> None:
    """Replace a file: whoever reads it, and whenever this process is killed, there is the old text or the new."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A temporary sibling to fill, which takes the name `path` when the block ends and is removed when it raises.

    Raises ValueError where `path` is there already, unless as an empty directory.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path}: exists and is not an empty directory")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    temporary.mkdir()
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        shutil.rmtree(temporary)
        raise

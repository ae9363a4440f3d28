"""JSONL files: one JSON object a line."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from launch.cli.errors import ConfigError


class JsonLinesWriter:
    """A JSONL file that is emptied when this is made and grows by what `append` is given.

    Records are on the disk when `append` returns, whatever happens next. Raises ConfigError, which names `option`, if
    the file cannot be written.
    """

    def __init__(self, option: str, path: str | Path) -> None:
        self._option, self._path = option, Path(path)
        self._write("", "w")

    def append(self, records: Iterable[dict[str, Any]]) -> None:
        """Write the records, a line each."""
        self._write("".join(json.dumps(record) + "\n" for record in records), "a")

    def _write(self, text: str, mode: Literal["w", "a"]) -> None:
        try:
            with self._path.open(mode, encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise ConfigError(f"{self._option} = {self._path}: cannot be written: {error.strerror}") from None


def read_lines(path: str | Path) -> Iterator[tuple[dict[str, object], str]]:
    """Yield the objects of a JSONL file, each with its `path:line`. Blank lines are skipped.

    Raises ConfigError naming that place, or the file, for whatever is not an object or cannot be read.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read it: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text") from None
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{path}:{number}"
            yield _record(line, where), where


def text_field(record: dict[str, object], field: str, where: str) -> str:
    """Return the text of a field. Raises ConfigError, naming `where`, unless it is a number or non-blank text."""
    if field not in record:
        raise ConfigError(f"{where}: no field {field!r}; it has {', '.join(map(repr, record)) or 'none'}")
    value = record[field]
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
        raise ConfigError(f"{where}: field {field!r} must be text or a number, not {json.dumps(value)[:80]}")
    return str(value)


def _record(line: str, where: str) -> dict[str, object]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: must be a JSON object, not {type(record).__name__}")
    return record

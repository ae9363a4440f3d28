"""Reading and writing of JSONL files: one JSON object per line."""

import json
import math
from collections.abc import Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from launch.cli.errors import ConfigError


class JsonLinesWriter:
    """Writer of a JSONL file. The constructor empties the file.

    `append` closes the file before it returns, so that a later crash loses no records. Raises ConfigError, with the
    name of the `option` that gave the path, if the file cannot be written.
    """

    def __init__(self, option: str, path: str | Path) -> None:
        self._option, self._path = option, Path(path)
        self._write("", "w")

    def append(self, records: Iterable[dict[str, Any]]) -> None:
        """Append the records to the file, one per line."""
        self._write("".join(json.dumps(record) + "\n" for record in records), "a")

    def _write(self, text: str, mode: Literal["w", "a"]) -> None:
        try:
            with self._path.open(mode, encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise ConfigError(f"{self._option} = {self._path}: cannot be written: {error.strerror}") from None


def read_lines(path: str | Path) -> Iterator[tuple[dict[str, object], str]]:
    """Yield (object, "path:line") for each line of a JSONL file. Blank lines and a byte order mark are skipped.

    Numbers with a fraction or an exponent are Decimal, as written. Raises ConfigError if the file cannot be read, or,
    with "path:line", if a line is not a JSON object.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: must be UTF-8 text") from None
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{path}:{number}"
            yield _record(line, where), where


def text_field(record: dict[str, object], field: str, where: str) -> str:
    """Return the text of a field; `a.b` also names field b of the object in field a.

    A number is written out in decimals, 0.00001 for 1e-5: scorers take the e for Euler's number. Raises ConfigError,
    naming `where`, unless the field is non-blank text or a number that float64 can hold.
    """
    return _text(field_value(record, field, where), field, where)


def field_value(record: dict[str, object], field: str, where: str) -> object:
    """Return the value of a field, as `text_field` finds it. Raises ConfigError, naming `where`, if there is none."""
    if field in record:
        return record[field]
    value: object = record
    for name in field.split("."):
        if not isinstance(value, dict) or name not in value:
            raise ConfigError(f"{where}: no field {field!r}; it has {', '.join(map(repr, record)) or 'none'}")
        value = value[name]
    return value


def _text(value: object, field: str, where: str) -> str:
    if isinstance(value, int | Decimal) and not isinstance(value, bool):
        number = Decimal(value)
        if not math.isfinite(float(number)) or (number and not float(number)):
            raise ConfigError(f"{where}: field {field!r} = {str(number)[:40]}: must be a finite number within float64")
        return f"{number:f}"
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(
            f"{where}: field {field!r} must be text or a number, not {json.dumps(value, default=str)[:80]}"
        )
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise ConfigError(f"{where}: field {field!r} holds half of a surrogate pair, which is no character")
    return value


def _record(line: str, where: str) -> dict[str, object]:
    """Parse one line. Raises ConfigError if it is not a JSON object."""
    try:
        record = json.loads(line, parse_float=Decimal, parse_constant=Decimal)
    except (ValueError, RecursionError, ArithmeticError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: must be a JSON object, not {type(record).__name__}")
    return record

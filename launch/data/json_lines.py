"""Readers of JSON and JSONL files, and a writer of JSONL files (one JSON object per line)."""

import gzip
import io
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from launch.errors import ConfigError
from models.files import object_of_pairs
from specjax.parallel import processes

# First bytes of a file that gzip has compressed.
_GZIP = b"\x1f\x8b"
# What a compressed file may hold: so many bytes, and with gzip so many times its own. Text has ten times its own, and
# a thousand times is possible.
_LEAST_BYTES, _MOST_TIMES = 2**28, 200
_MISSING = object()


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
        if not processes.primary():
            return
        try:
            with self._path.open(mode, encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise ConfigError(f"{self._option} = {self._path}: cannot be written: {error.strerror}") from None


def read_lines(option: str, path: str | Path) -> Iterator[tuple[dict[str, object], str]]:
    """Yield (object, place) for each line of a JSONL file, or each item of a JSON array. Blank lines are skipped.

    The place is "path:line" or "path: item i", for error messages. Numbers with a fraction or an exponent are Decimal,
    as written. Raises ConfigError, naming `option`, if the file cannot be read, or with its place, if an item is not a
    JSON object.
    """
    text = read_text(option, path)
    if text.lstrip().startswith("["):
        for number, item in enumerate(parse_json(text, str(path)), start=1):
            yield _object(item, f"{path}: item {number}"), f"{path}: item {number}"
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"{path}:{number}"
            yield _object(parse_json(line, where), where), where


def read_text(option: str, path: str | Path) -> str:
    """Return the text of a file, which gzip may have compressed, without its byte order mark.

    Raises ConfigError, naming `option`, if it cannot be read.
    """
    try:
        contents = Path(path).read_bytes()
        if contents.startswith(_GZIP):
            limit = most_bytes(len(contents), _MOST_TIMES)
            with gzip.open(io.BytesIO(contents)) as file:
                contents = file.read(limit + 1)
            check_bytes(len(contents), limit)
        return contents.decode("utf-8-sig")
    except (OSError, EOFError, ValueError, zlib.error) as error:
        if isinstance(error, UnicodeDecodeError):
            raise ConfigError(f"{option} = {path}: must be UTF-8 text, plain or compressed by gzip") from None
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{option} = {path}: cannot be read: {reason}") from None


def most_bytes(size: int, times: int) -> int:
    """Return how many bytes a compressed file of `size` bytes may hold."""
    return _LEAST_BYTES + times * size


def check_bytes(count: int, most: int) -> None:
    """Raise ValueError for a file that holds more than `most_bytes`: it is made to fill the memory."""
    if count > most:
        raise ValueError(f"holds over {most / 2**20:.0f} MiB when decompressed, far beyond its size; must hold less")


def without_nulls(value: Any) -> Any:
    """Return a JSON value without the members of objects that are null, at every depth. Items of lists stay.

    Arrow pads the fields that an object lacks with null, so null and absent cannot be told apart.
    """
    if isinstance(value, dict):
        return {name: without_nulls(member) for name, member in value.items() if member is not None}
    return [*map(without_nulls, value)] if isinstance(value, list) else value


def text_field(record: dict[str, object], field: str, where: str) -> str:
    """Return the text of a field; `a.b` also names field b of the object in field a.

    A number is written in decimals, 0.00001 for 1e-5, because scorers read the e as Euler's number, and 2 for 2.0,
    because Arrow makes floats of the integers of a column that also has other numbers. Raises ConfigError, naming
    `where`, unless the field is non-blank text or a number that float64 can hold.
    """
    return _text(field_value(record, field, where), field, where)


def field_value(record: dict[str, object], field: str, where: str) -> object:
    """Return the value of a field, as `text_field` finds it. Raises ConfigError, naming `where`, if there is none."""
    if (value := _find(record, field)) is _MISSING:
        raise ConfigError(f"{where}: no field {field!r}; it has {_names(record)}")
    return value


def optional_value(record: dict[str, object], field: str) -> object:
    """Return the value of a field, as `text_field` finds it; None if there is none."""
    return None if (value := _find(record, field)) is _MISSING else value


def require_fields(
    record: dict[str, object], fields: Mapping[str, str], where: str, usual: Mapping[str, Sequence[str]]
) -> None:
    """Raise ConfigError with a line for each option of `fields` (option -> field) whose field the record lacks.

    usual: option to the usual names of its field. The first that the record has is offered.
    """
    missing = [(option, field) for option, field in fields.items() if _find(record, field) is _MISSING]
    if missing:
        ending = f"{where} has no such field; it has {_names(record)}"
        offers = [_offer(option, record, usual.get(option, ())) for option, _ in missing]
        lines = zip(missing, offers, strict=True)
        raise ConfigError(*(f"{option} = {field}: {ending}{offer}" for (option, field), offer in lines))


def _offer(option: str, record: dict[str, object], names: Sequence[str]) -> str:
    """Return how to name the first of `names` that the record has; "" if it has none."""
    name = next((name for name in names if _find(record, name) is not _MISSING), None)
    if name is None:
        return ""
    flag = option.replace("_", "-")
    return f'; to read {name!r}: --{flag} {name} on the command line, options={{"{option}": "{name}"}} in Python'


def _find(record: dict[str, object], field: str) -> object:
    """Return the value of a field, _MISSING if there is none."""
    if field in record:
        return record[field]
    value: object = record
    for name in field.split("."):
        if not isinstance(value, dict) or name not in value:
            return _MISSING
        value = value[name]
    return value


def _names(record: dict[str, object]) -> str:
    return ", ".join(map(repr, record)) or "none"


def json_text(value: object, *, strict: bool = False) -> str:
    """Return the JSON of a value of a record: decimals as numbers, arrays as lists, dates and other things as text.

    strict: raise ValueError for everything that JSON does not have, except decimals.
    """

    def plain(value: Any) -> object:
        if isinstance(value, Decimal):
            return float(value)
        if strict:
            raise ValueError(f"{type(value).__name__} is no JSON value")
        return value.tolist() if hasattr(value, "tolist") else str(value)

    return json.dumps(value, default=plain, ensure_ascii=False, allow_nan=not strict)


def _text(value: object, field: str, where: str) -> str:
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        number = Decimal(str(value) if isinstance(value, float) else value)
        if not math.isfinite(float(number)) or (number and not float(number)):
            raise ConfigError(f"{where}: field {field!r} = {str(number)[:40]}: must be a finite number within float64")
        return str(int(number)) if number == int(number) else f"{number:f}"
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(
            f"{where}: field {field!r} must be text or a number, not {json.dumps(value, default=str)[:80]}"
        )
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise ConfigError(f"{where}: field {field!r}: must not hold half of a surrogate pair")
    return value


def parse_json(text: str, where: str) -> Any:
    """Return the value of JSON as `read_lines` reads it. Raises ConfigError, naming `where`; also for repeated keys."""
    try:
        return json.loads(text, parse_float=Decimal, parse_constant=Decimal, object_pairs_hook=object_of_pairs)
    except (ValueError, RecursionError, ArithmeticError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None


def _object(value: Any, where: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: must be a JSON object, not {type(value).__name__}")
    return value

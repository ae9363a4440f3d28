"""The files of a run: their names, their records, and the records that a resumed run sets aside to write again."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from launch.errors import as_config_error
from models.files import check_file, write_atomically
from specjax.parallel import processes

METRICS_FILE = "metrics.jsonl"
EVENTS_FILE = "diary.jsonl"
SAMPLES_FILE = "samples.jsonl"
SET_ASIDE = ".set_aside"
LARGEST_NUMBER = 3.4e38


def records_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file, objects with a whole number as their step. Other lines, and no file, yield none."""
    for line in lines_of(path):
        if (record := _record(line)) is not None:
            yield record


def cut_after(path: Path, last: int, *, every: bool = False, report: Callable[[str], None] = print) -> int | None:
    """Keep the records up to step `last`; move other lines to a file beside it. Return the last step left.

    every:  keep all records of a step; otherwise only its last one.
    report: called with one line if there were damaged ones.

    Records of later steps are written again by the run. Lines that are no records were damaged. The primary process
    does it, for all.
    """
    return processes.on_primary(lambda: _cut_after(path, last, every, report))


def _cut_after(path: Path, last: int, every: bool, report: Callable[[str], None]) -> int | None:
    kept, later, damaged = dict[tuple[int, int], bytes](), list[bytes](), list[bytes]()
    for number, line in enumerate(lines_of(path)):
        record = _record(line)
        if record is None:
            damaged.append(line)
        elif record["step"] <= last:
            kept[record["step"], number if every else 0] = line
        else:
            later.append(line)
    if later or damaged:
        aside = path.with_name(path.name + SET_ASIDE)
        with aside.open("ab") as file:
            file.writelines(line + b"\n" for line in damaged + later)
    if damaged:
        report(f"{path}: {len(damaged)} lines are no records of a run; moved to {path.name}{SET_ASIDE}")
    write_atomically(path, b"".join(line + b"\n" for line in kept.values()))
    return max((step for step, _ in kept), default=None)


def missing_history(directory: Path, last: int, samples: bool) -> list[str]:
    """Return a line for each file of a run that lacks records up to step `last`. samples: the run logs samples."""
    metrics = directory / METRICS_FILE
    missing = sorted({*range(1, last + 1)} - {record["step"] for record in records_of(metrics)})
    lines = [f"{metrics}: has no metrics of {len(missing)} of {last} steps, the first {missing[0]}"] if missing else []
    others = {EVENTS_FILE: "warnings"} | ({SAMPLES_FILE: "completions"} if samples else {})
    return lines + [
        f"{directory / name}: is missing: there are no {records} of the {last} steps so far"
        for name, records in others.items()
        if not (directory / name).exists()
    ]


def lines_of(path: Path) -> list[bytes]:
    """Return the lines of a file that are not blank; none if there is no file. Raises ConfigError if it is a pipe."""
    if path.exists():
        with as_config_error():
            check_file(path)
    return [line for line in path.read_bytes().split(b"\n") if line.strip()] if path.exists() else []


def matches_schema(value: Any, shape: Any) -> bool:
    """Return whether a JSON value has the fields and types of a schema, `shape`.

    A type, or a union of types, fits its values; a bool is no number, and numbers are within float32. [shape] fits
    lists, (a, b) lists of two, and a dict of shapes objects with at least these fields. {str: shape} fits objects whose
    every value fits.
    """
    match shape:
        case [each] if isinstance(shape, list):
            return isinstance(value, list) and all(matches_schema(item, each) for item in value)
        case tuple():
            return isinstance(value, list) and len(value) == len(shape) and all(map(matches_schema, value, shape))
        case dict() if str in shape:
            return isinstance(value, dict) and all(matches_schema(item, shape[str]) for item in value.values())
        case dict():
            return isinstance(value, dict) and all(
                name in value and matches_schema(value[name], shape[name]) for name in shape
            )
    if isinstance(value, bool):
        return shape in (bool, bool | None)
    return isinstance(value, shape) and (not isinstance(value, int | float) or abs(value) <= LARGEST_NUMBER)


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and type(record.get("step")) is int else None

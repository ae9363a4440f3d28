"""Read what a run has recorded in its directory: options, metrics, samples and events."""

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from configs.from_json import without_idle_options
from configs.override import flat
from configs.schema import RunConfig
from launch.cli.paths import CONFIG_FILE
from launch.cli.recipe_options import reads
from launch.errors import ConfigError
from launch.run.history import (
    EVENTS_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    lines_of,
    matches_schema,
    records_of,
)
from models.files import read_json

_COMPLETION = {"prompt": str, "answer": str, "reward": int | float | None, "stopped": bool | None}
# Runs from before `extracted` and `advantage` are read too.
SAMPLE = {"budget": int, "lengths": [int], "completions": [_COMPLETION | {"pieces": [(str, int | None)]}]}
EVENT = {
    "start": {"date": str, "device": str, "host": str, "versions": {str: str}},
    "summary": [str],
    "warning": str,
    "result": {str: int | float},
    "times": {str: int | float},
}


@dataclass(frozen=True)
class RunRecords:
    """Records of a run, finished or not.

    Attributes:
        name:    Name of the directory.
        config:  Contents of config.json.
        steps:   int [n], the steps in metrics.jsonl.
        metrics: By name, float [n]; NaN where a step did not measure it.
        samples: Lines of samples.jsonl (launch.run.logs).
        events:  Lines of diary.jsonl (launch.run.logs).
        damaged: A line for each file of which records were left out.
    """

    name: str
    config: dict[str, Any]
    steps: np.ndarray
    metrics: dict[str, np.ndarray]
    samples: list[dict[str, Any]]
    events: list[dict[str, Any]]
    damaged: list[str]

    def measured(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (steps, values) of the steps that measured this metric."""
        values = self.metrics.get(metric, np.full(len(self.steps), np.nan))
        found = np.isfinite(values)
        return self.steps[found], values[found]

    def events_of(self, kind: str) -> list[tuple[int, Any]]:
        """Return (step, value) of each event of this kind."""
        return [(line["step"], line[kind]) for line in self.events if kind in line]


def read_run(directory: Path) -> RunRecords:
    """Read the records of a run; those that are damaged are left out and counted.

    Raises ConfigError if the directory is not a run's or its config.json is damaged.
    """
    if not (directory / METRICS_FILE).is_file():
        raise ConfigError(f"DIR = {directory}: must be the directory of a run, with a {METRICS_FILE}")
    try:
        config = read_json(directory / CONFIG_FILE)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    damaged = list[str]()
    lines = _records(directory / METRICS_FILE, {}, damaged)
    names = list(dict.fromkeys(name for line in lines for name in line if name != "step"))
    return RunRecords(
        name=directory.resolve().name,
        config=config,
        steps=np.array([line["step"] for line in lines], np.int64),
        metrics={name: np.array([_number(line.get(name)) for line in lines], np.float64) for name in names},
        samples=_records(directory / SAMPLES_FILE, SAMPLE, damaged),
        events=_events(directory / EVENTS_FILE, damaged),
        damaged=damaged,
    )


def as_recorded(config: RunConfig) -> dict[str, Any]:
    """Return the options by dotted path, with the values that config.json holds: lists instead of tuples."""
    return flat(json.loads(json.dumps(dataclasses.asdict(config))))


def read_recorded(path: Path, option: str) -> dict[str, Any]:
    """Return the options of a config.json by dotted path. Raises ConfigError, naming `option`, if it is unreadable."""
    try:
        return flat(without_idle_options(read_json(path)))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option}: cannot read {path}: {error}") from None


def differences(config: RunConfig, recorded: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, value, recorded value) of each option that differs. Where one lacks it, its value is "absent".

    An option newer than the record counts as its default. In a network that a recipe describes, it counts as None.
    """
    values = as_recorded(config)
    defaults = as_recorded(RunConfig(name=config.name, steps=config.steps))
    for name in dict.fromkeys([*values, *recorded]):
        was, now = recorded.get(name, defaults.get(name, "absent")), values.get(name, "absent")
        if was != now and (was, now) != ("absent", None):
            yield name, now, was


def check_same(config: RunConfig, recorded: dict[str, Any], options: Sequence[str]) -> None:
    """Raise ConfigError if one of the options (patterns of launch.cli.recipe_options) differs from the run's."""
    for name, now, was in differences(config, recorded):
        if reads(options, name):
            raise ConfigError(f"{name} = {now}: the run has {was}")


def _events(path: Path, damaged: list[str]) -> list[dict[str, Any]]:
    records = _records(path, {}, damaged)
    found = [
        each
        for each in records
        if all(matches_schema(each[kind], shape) for kind, shape in EVENT.items() if kind in each)
    ]
    if len(found) < len(records):
        damaged.append(f"{path.name}: {len(records) - len(found)} events have other values, and are left out")
    return found


def _number(value: Any) -> float:
    """Return a JSON number, NaN for anything else. A number that float32 does not tell from 0 is 0."""
    return (float(value) if abs(value) > 1e-45 else 0.0) if matches_schema(value, int | float) else math.nan


def _records(path: Path, shape: Any, damaged: list[str]) -> list[dict[str, Any]]:
    """Return the records of a file that have a shape. Add a line to `damaged` if there are others.

    A killed process may leave its last line unfinished.
    """
    lines, found = lines_of(path), [record for record in records_of(path) if matches_schema(record, shape)]
    found = [record for record in found if abs(record["step"]) < 2**53]
    if len(found) < len(lines):
        damaged.append(f"{path.name}: {len(lines) - len(found)} of {len(lines)} lines are no records, and left out")
    return found

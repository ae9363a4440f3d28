"""Read the metrics, samples and events that a run has written to its directory."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from launch.cli.errors import ConfigError
from launch.run.directory import CONFIG_FILE, EVENTS_FILE, METRICS_FILE
from launch.run.history import lines_of, records_of
from launch.run.recorded import flat
from launch.run.restore import saved_step
from launch.run.sample_log import SAMPLES_FILE
from launch.run.shapes import matches_schema
from models.checkpoints.made_for import MadeFor
from models.config import DecoderConfig
from models.files import read_json
from specjax.checkpoint import Which

_COMPLETION = {"prompt": str, "answer": str, "reward": int | float | None, "stopped": bool | None}
SAMPLE = {"budget": int, "lengths": [int], "completions": [_COMPLETION | {"pieces": [(str, int | None)]}]}
EVENT = {
    "start": {"date": str, "device": str, "host": str, "versions": {str: str}},
    "warning": str,
    "result": {str: int | float},
}


@dataclass(frozen=True)
class Run:
    """Records of a run, finished or not.

    Attributes:
        name:    Name of the directory.
        config:  Contents of config.json.
        steps:   int [n], the steps in metrics.jsonl.
        metrics: By name, float [n]; NaN where a step did not measure it.
        samples: Lines of samples.jsonl (launch.run.sample_log).
        events:  Lines of diary.jsonl (launch.run.event_log).
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


def read_run(directory: Path) -> Run:
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
    return Run(
        name=directory.resolve().name,
        config=config,
        steps=np.array([line["step"] for line in lines], np.int64),
        metrics={name: np.array([_number(line.get(name)) for line in lines], np.float64) for name in names},
        samples=_records(directory / SAMPLES_FILE, SAMPLE, damaged),
        events=_events(directory / EVENTS_FILE, damaged),
        damaged=damaged,
    )


def made_for(directory: Path, which: Which, decoder: DecoderConfig | None) -> MadeFor | None:
    """Return the record of a draft in a run's checkpoint: its policy, the policy's shape, and the predicted acceptance.

    None if the run's metrics are missing, or if the policy is of a custom family. The acceptance is that of the saved
    step; a checkpoint from before the first step has none.
    """
    if decoder is None or not (directory / METRICS_FILE).is_file():
        return None
    run = read_run(directory)
    steps, values = run.measured("draft/predicted_acceptance")
    predicted = values[steps == saved_step(directory, which)].tolist()
    temperature = flat(run.config).get("rollout.law.temperature")
    if not isinstance(temperature, int | float) or not matches_schema(temperature, int | float):
        raise ConfigError(f"{directory / CONFIG_FILE}: rollout.law.temperature = {temperature}: must be a number")
    return MadeFor(str(directory), decoder.hidden_size, decoder.num_layers, temperature, next(iter(predicted), None))


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

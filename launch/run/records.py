"""Read the metrics, samples and events that a run has written to its directory."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from launch.cli.errors import ConfigError
from launch.run.directory import CONFIG_FILE, EVENTS_FILE, METRICS_FILE
from launch.run.restore import saved_step
from launch.run.sample_log import SAMPLES_FILE
from models.checkpoints.made_for import MadeFor
from models.config import DecoderConfig
from models.files import read_json
from specjax.checkpoint import Which


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
    """

    name: str
    config: dict[str, Any]
    steps: np.ndarray
    metrics: dict[str, np.ndarray]
    samples: list[dict[str, Any]]
    events: list[dict[str, Any]]

    def measured(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (steps, values) of the steps that measured this metric."""
        values = self.metrics.get(metric, np.full(len(self.steps), np.nan))
        found = np.isfinite(values)
        return self.steps[found], values[found]

    def events_of(self, kind: str) -> list[tuple[int, Any]]:
        """Return (step, value) of each event of this kind."""
        return [(line["step"], line[kind]) for line in self.events if kind in line]


def read_run(directory: Path) -> Run:
    """Read the records of a run. Raise ConfigError if the directory is not a run's or a file is damaged."""
    if not (directory / METRICS_FILE).is_file():
        raise ConfigError(f"DIR = {directory}: must be the directory of a run, with a {METRICS_FILE}")
    try:
        config = read_json(directory / CONFIG_FILE)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    lines = _lines(directory / METRICS_FILE)
    names = list(dict.fromkeys(name for line in lines for name in line if name != "step"))
    return Run(
        name=directory.resolve().name,
        config=config,
        steps=np.array([line["step"] for line in lines], np.int64),
        # None becomes NaN.
        metrics={name: np.array([line.get(name) for line in lines], np.float64) for name in names},
        samples=_lines(directory / SAMPLES_FILE),
        events=_lines(directory / EVENTS_FILE),
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
    temperature = run.config["rollout"]["law"]["temperature"]
    return MadeFor(str(directory), decoder.hidden_size, decoder.num_layers, temperature, next(iter(predicted), None))


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a file, each with a step. Skips an unfinished last line of a killed process."""
    lines, found = (path.read_text(encoding="utf-8").splitlines() if path.exists() else []), []
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                break
            raise ConfigError(f"{path}:{number}: not JSON: {error}") from None
        if not isinstance(value, dict) or not isinstance(value.get("step"), int):
            raise ConfigError(f"{path}:{number}: must be a JSON object with a whole number as its step")
        found.append(value)
    return found

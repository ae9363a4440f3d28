"""Inputs of a simulation from the directory of a run: acceptance, lengths, stage times and costs of rounds."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from launch.cli.errors import ConfigError
from launch.costs.cost_table import COST_TABLE, read_cells
from launch.run.recorded import flat
from launch.run.records import Run, read_run
from launch.simulation.machine import Evidence
from launch.simulation.point import MEASURED

# Steps at the end of the run that count.
LAST = 50
# Fields of a point, and the metrics that they are sums of.
STAGES = {"other_s": ("data", "prepare", "reward"), "train_s": ("train",), "logprob_s": ("logprob",)}


def read_evidence(directory: Path) -> tuple[dict[str, Any], Evidence]:
    """Return the fields of a point that a run gives, and its measurements. Raises ConfigError."""
    run = read_run(directory)
    config, accepted = flat(run.config), _acceptance_by_position(run)
    if not accepted.size:
        raise ConfigError(f"from_run = {directory}: no step has drafted, so that acceptance is not known")
    lengths = [float(length) for sample in run.samples[-LAST:] for length in sample["lengths"]]
    limit = _whole(config, "rollout.max_new_tokens")
    found: dict[str, Any] = {
        "hardware": MEASURED,
        "gpus": _whole(config, "mesh.data") * _whole(config, "mesh.fsdp"),
        "measured_at": accepted.shape[1],
        "acceptance_length": float(1 + accepted.mean(0).sum()),
        "draft_length": _whole(config, "rollout.draft_length"),
        "draft_lengths": tuple(config.get("rollout.draft_lengths", ())),
        "sequences": _whole(config, "data.prompts") * _whole(config, "rollout.group_size"),
        "limit_tokens": limit,
        "mean_tokens": float(np.mean(lengths)) if lengths else _median(run, "rollout/length_mean"),
    }
    found |= {name: sum(_median(run, f"time/{stage}") for stage in parts) for name, parts in STAGES.items()}
    table = directory / COST_TABLE
    cells = read_cells(table) if table.is_file() else []
    if cells:
        slots = sorted({cell.slots for cell in cells}, reverse=True)
        found["slots"] = slots[0]
        found["prompt_tokens"] = max(max(cell.window for cell in cells) - limit, 1)
        found["phases"] = tuple(sorted({slots for slots, _ in config.get("rollout.phases", ())}, reverse=True))
    generation = _median(run, "time/generation")
    return found, Evidence(tuple(lengths), tuple(cells), tuple(1 + accepted.sum(1)), generation_s=generation)


def _whole(config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    if type(value) is not int:
        raise ConfigError(f"config.json: {name} = {value!r}: must be a whole number")
    return value


def _acceptance_by_position(run: Run) -> np.ndarray:
    """Return the acceptance rate by position of a draft, [steps, positions], of the last steps that have them all."""
    names = itertools.takewhile(run.metrics.__contains__, (f"rollout/acceptance_rate_pos_{i}" for i in range(1, 129)))
    table = np.array([run.metrics[name] for name in names]).reshape(-1, len(run.steps)).T
    return table[np.isfinite(table).all(1)][-LAST:] if table.size else np.zeros((0, 0))


def _median(run: Run, metric: str) -> float:
    """Return the median over the last steps; 0 if none measured it."""
    values = run.measured(metric)[1][-LAST:]
    return float(np.median(values)) if values.size else 0.0

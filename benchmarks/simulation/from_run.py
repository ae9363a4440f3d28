"""Inputs of a simulation from the directory of a run: acceptance, lengths, stage times and costs of rounds."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.simulation.machine import Evidence
from benchmarks.simulation.point import MEASURED, MOST_DRAFT_TRAINING
from launch.costs.cost_table import COST_TABLE, read_cells
from launch.errors import ConfigError, as_config_error
from launch.run.records import RunRecords, flat, read_run
from models.config import DecoderConfig
from models.hf.config import read_hf_config
from models.published import DECODERS
from models.sheets import decoder_sheet
from specjax.parallel.mesh import AXES, BATCH_AXES
from specjax.rollout.plan import Phase, RolloutConfig, lay_out
from specjax.types import Mixture

# Steps at the end of the run that count.
LAST = 50
# Fields of a point, and the metrics that they are sums of. An asynchronous run has no times of the stages that its
# programs join.
STAGES = {"other_s": ("data", "prepare", "reward"), "logprob_s": ("logprob",)}
# Fields of a point that hold only on the run's own machine.
MACHINE_FIELDS = (*STAGES, "train_s", "draft_training", "slots", "phases", "gpus", "lag", "generation_gpus")


def read_evidence(directory: Path) -> tuple[dict[str, Any], Evidence]:
    """Return the fields of a point that a run gives, and its measurements. Raises ConfigError."""
    run = read_run(directory)
    config, accepted = flat(run.config), _acceptance_by_position(run)
    if not accepted.size:
        raise ConfigError(f"from_run = {directory}: no step has drafted, so that acceptance is not known")
    if (share := config.get("rollout.carry_over")) is not None:
        raise ConfigError(f"from_run = {directory}: its rollout.carry_over = {share}; must be None, or lengths are cut")
    lengths = [float(length) for sample in run.samples[-LAST:] for length in sample["lengths"]]
    values: dict[str, Any] = {
        "hardware": MEASURED,
        "measured_at": accepted.shape[1],
        "acceptance_length": float(1 + accepted.mean(0).sum()),
        "draft_length": _integer(config, "rollout.draft_length"),
        "draft_lengths": tuple(config.get("rollout.draft_lengths", ())),
        "sequences": _integer(config, "data.prompts") * _integer(config, "rollout.group_size"),
        "limit_tokens": _integer(config, "rollout.max_new_tokens"),
        "mean_tokens": float(np.mean(lengths)) if lengths else _median(run, "rollout/length_mean"),
    }
    rollout_mesh = "mesh" if config.get("asynchronous.lag") is None else "asynchronous.rollout_mesh"
    shards, lag = _shards(config, rollout_mesh), config.get("asynchronous.lag") or 0
    values |= {"gpus": shards, "lag": lag}
    train_s, draft_s, notes = _training(run)
    if lag:
        # Devices of both sides in data shards of the rollout mesh, model axes included.
        training = max(_shards(config, "mesh", AXES) * shards // _shards(config, rollout_mesh, AXES), 1)
        values |= {"gpus": shards + training, "generation_gpus": shards}
        # Seconds of training are given for all devices.
        train_s, draft_s = (seconds * training / values["gpus"] for seconds in (train_s, draft_s))
    values |= {name: sum(_median(run, f"time/{stage}") for stage in parts) for name, parts in STAGES.items()}
    values |= {"train_s": train_s, "draft_training": min(draft_s / train_s, MOST_DRAFT_TRAINING) if train_s else 0.0}
    generation_s = _median(run, "time/generation") or _median(run, "time/rollout_mesh_busy")
    evidence = Evidence(tuple(lengths), steps=tuple(1 + accepted.sum(1)), generation_s=generation_s)
    table = directory / COST_TABLE
    cells = read_cells(table) if table.is_file() else []
    if cells:
        # The widest round holds the longest prompt and its completion.
        width = max(max(cell.window for cell in cells) - values["limit_tokens"], 1)
        phases = _phases(config, values["sequences"] // shards, width)
        mixture, unknown = _mixture(config)
        values |= {"slots": phases[0].slots, "phases": tuple(dict.fromkeys(slots for slots, _ in phases))}
        values["prompt_tokens"] = width
        evidence = evidence._replace(cells=tuple(cells), phases=phases, mixture=mixture)
        notes += unknown
    return values, evidence._replace(notes=notes)


def _shards(config: dict[str, Any], mesh: str, axes: tuple[str, ...] = BATCH_AXES) -> int:
    """Return the devices of a mesh along some axes, by default the axes of data shards."""
    return math.prod(_integer(config, f"{mesh}.{axis}") for axis in axes)


def _phases(config: dict[str, Any], sequences: int, prompt_width: int) -> tuple[Phase, ...]:
    """Return the phases of a data shard with so many sequences."""
    with as_config_error():
        rollout = RolloutConfig(
            max_new_tokens=_integer(config, "rollout.max_new_tokens"),
            phases=tuple((slots, window) for slots, window in config.get("rollout.phases", ())),
        )
        return lay_out(rollout, sequences, prompt_width)


def _mixture(config: dict[str, Any]) -> tuple[Mixture | None, tuple[str, ...]]:
    """Return the policy's mixture of experts, and a line that says so where the run's directory does not tell."""
    path, family = config.get("model.path"), config.get("model.family")
    if family is not None:
        return None, (f"model.family = {family}: its rounds count as those of a network without experts",)
    if path is None:
        experts, active = (config.get(f"model.architecture.experts.{name}") for name in ("num_experts", "active"))
        layers = config.get("model.architecture.experts.layers") or [0]
        return (Mixture(len(layers), experts, active) if experts and active else None), ()
    decoder = _read_decoder(Path(path)) or DECODERS.get(path.rpartition("/")[2].partition("@")[0].lower())
    if decoder is None:
        return None, (f"model.path = {path}: is not here; its rounds count as those of a network without experts",)
    return decoder_sheet(decoder).mixture, ()


def _read_decoder(path: Path) -> DecoderConfig | None:
    """Return the config of a checkpoint; None without such a directory."""
    if not (path / "config.json").is_file():
        return None
    with as_config_error():
        return read_hf_config(path, ())


def _training(run: RunRecords) -> tuple[float, float, tuple[str, ...]]:
    """Return the seconds of training the policy, the seconds that training the draft adds to a step, and notes."""
    # A probe times its stages. An asynchronous run has none; its training mesh is idle or trains.
    train_s = _column(run, "time/train")
    if not np.isfinite(train_s).any():
        train_s = _column(run, "time/step") - _column(run, "time/training_mesh_idle")
    known, trained = np.isfinite(train_s), np.nan_to_num(_column(run, "draft/trained"))
    if not known.any():
        return 0.0, 0.0, ("the run never probed its stages (--probe-every): those beside generation count as 0",)
    often = float(trained[-LAST:].mean())
    share = run.measured("time/draft_training")[1]
    if not often or not share.size:
        mixed = "training the draft was not told apart from training the policy: it counts with drafts and without"
        return float(np.median(train_s[known][-LAST:])), 0.0, (mixed,) if often else ()
    steps = _column(run, "time/step")[np.isnan(_column(run, "time/generation"))]
    draft_s = float(share[-1] * np.nanmean(steps[-LAST:]))
    policy_s = np.median((train_s - trained * draft_s / often)[known][-LAST:])
    return max(float(policy_s), 0.0), draft_s, ()


def _integer(config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    if type(value) is not int:
        raise ConfigError(f"config.json: {name} = {value!r}: must be a whole number")
    return value


def _acceptance_by_position(run: RunRecords) -> np.ndarray:
    """Return the acceptance rate by position of a draft, [steps, positions], of the last steps that have them all."""
    names = itertools.takewhile(run.metrics.__contains__, (f"rollout/acceptance_rate_pos_{i}" for i in range(1, 129)))
    table = np.array([run.metrics[name] for name in names]).reshape(-1, len(run.steps)).T
    return table[np.isfinite(table).all(1)][-LAST:] if table.size else np.zeros((0, 0))


def _column(run: RunRecords, metric: str) -> np.ndarray:
    """Return the values of a metric, NaN where a step did not measure it."""
    return run.metrics.get(metric, np.full(len(run.steps), np.nan))


def _median(run: RunRecords, metric: str) -> float:
    """Return the median over the last steps; 0 if none measured it."""
    values = run.measured(metric)[1][-LAST:]
    return float(np.median(values)) if values.size else 0.0

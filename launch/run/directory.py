"""Run directories: choose one, read checkpoints from one, and check which options a resumed run may change."""

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from configs.schema import RunConfig
from launch.build.experiment import Experiment
from launch.cli.errors import ConfigError
from models.files import write_atomically
from specjax.checkpoint import Checkpointer, Which
from specjax.checkpoint_integrity import DamagedSave, saved_steps, set_damaged_aside
from specjax.types import Params, PyTree

RUNS = Path("runs")
CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"
CHECKPOINTS = "checkpoints"

# Options that a resumed run may change: up to rounding, they do not affect the updates of later steps.
FREE_ON_RESUME = (
    *("steps", "out", "resume", "probe_every", "print_every", "profile_step"),
    *("gap_alarm", "max_skipped"),
    *("log", "eval", "checkpoint", "speedup", "mesh"),
    # The layout of a step in time and memory, which another mesh may need to change.
    *("microbatches", "ladder", "logit_chunk", "model.remat", "reward.workers"),
)
# With automatic draft lengths these stay fixed too: costs were measured on this mesh, at these probes.
FREE_WHILE_CHOOSING = tuple(name for name in FREE_ON_RESUME if name not in ("mesh", "probe_every"))


def open_run(config: RunConfig, report: Callable[[str], None] = print) -> Path:
    """Return the directory of a new run, or with `resume` of the run to continue, and write config.json there.

    report: called with one line for each damaged checkpoint that was renamed out of the way.

    Raises ConfigError if a new run would overwrite another, if every checkpoint to resume from is damaged, or if an
    option that must not change differs from the run to resume.
    """
    directory = _existing(config) if config.resume else _new(config)
    text = json.dumps(dataclasses.asdict(config), indent=2) + "\n"
    if config.resume:
        _check_unchanged(directory / CONFIG_FILE, config)
        try:
            for damaged in set_damaged_aside(directory / CHECKPOINTS):
                report(damaged)
        except DamagedSave as error:
            raise ConfigError(f"resume: {error}") from error
    write_atomically(directory / CONFIG_FILE, text)
    return directory


def resumes(config: RunConfig) -> bool:
    """Return whether there is a checkpoint to resume from. A run that ended before its first one starts from scratch.

    Raises ConfigError if there is no run to resume, or if it was configured to save nothing.
    """
    return config.resume and bool(saved_steps(_existing(config) / CHECKPOINTS))


def params_of(checkpoint: str | None, experiment: Experiment, which: Which = "newest") -> Params:
    """Return the networks of a run's checkpoint, or without one the recipe's initial networks."""
    return experiment.networks.params if checkpoint is None else restore_params(Path(checkpoint), experiment, which)


def cut_lines(path: Path, last: int, *, every: bool = False) -> int | None:
    """Drop the lines of a JSONL file after step `last`, and lines that are not JSON. Return the last step left.

    every: keep all lines of a step; otherwise only its last one.
    """
    kept = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines() if path.exists() else ()):
        try:
            step = json.loads(line)["step"]
        except ValueError:
            continue
        if step <= last:
            kept[step, number if every else 0] = line
    write_atomically(path, "".join(f"{line}\n" for line in kept.values()))
    return max((step for step, _ in kept), default=None)


def restore_params(directory: Path, experiment: Experiment, which: Which = "newest") -> Params:
    """Return the networks of a run's checkpoint, on the mesh of `experiment`, without the drafter's memory of prompts.

    Raises ConfigError, naming the option `checkpoint`, if there is no checkpoint of such networks.
    """
    with _saves(directory) as saves:
        params, extra = saves.restore_params(_abstract(experiment.networks.params), which)
    if extra["draft_vocabulary"] != experiment.draft_vocabulary:
        raise ConfigError(f"checkpoint = {directory}: its problems differ, and so does its draft vocabulary")
    return params


def restore_policy(directory: Path, experiment: Experiment, which: Which = "newest") -> PyTree:
    """Return the policy of a run's checkpoint, whatever its draft."""
    with _saves(directory) as saves:
        return saves.restore_policy(_abstract(experiment.networks.params.policy), which)


def saved_step(directory: Path, which: Which = "newest") -> int:
    """Return the step of the checkpoint that `restore_params` reads."""
    with _saves(directory) as saves:
        return saves.step_of(which)


@contextlib.contextmanager
def _saves(directory: Path) -> Iterator[Checkpointer]:
    """Yield the checkpoints of a run for reading. Turn errors into ConfigError that names the option `checkpoint`."""
    if not (directory / CHECKPOINTS).is_dir():
        raise ConfigError(f"checkpoint = {directory}: has no {CHECKPOINTS}; must be a run directory")
    try:
        with Checkpointer(directory / CHECKPOINTS) as saves:
            yield saves
    except ValueError as error:
        raise ConfigError(f"checkpoint: {error}") from error


def _abstract(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def _new(config: RunConfig) -> Path:
    try:
        if config.out is None:
            return _next(config.name)
        directory = Path(config.out)
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out = {config.out}: cannot make a directory there: {error.strerror}") from None
    if _holds_a_run(directory):
        raise ConfigError(f"out = {directory}: holds a run already; --resume continues it")
    return directory


def _next(name: str) -> Path:
    number = 1
    while True:
        directory = RUNS / (name if number == 1 else f"{name}-{number}")
        # If two runs start at once, the one that creates the directory gets it.
        with contextlib.suppress(FileExistsError):
            directory.mkdir(parents=True)
            return directory
        number += 1


def _holds_a_run(directory: Path) -> bool:
    """Return whether the directory has metrics or checkpoints; a run that failed before its first step has neither."""
    metrics, checkpoints = directory / METRICS_FILE, directory / CHECKPOINTS
    return (metrics.is_file() and metrics.stat().st_size > 0) or (checkpoints.is_dir() and any(checkpoints.iterdir()))


def _existing(config: RunConfig) -> Path:
    directory = _newest(config.name) if config.out is None else Path(config.out)
    if not saved_steps(directory / CHECKPOINTS) and not _stored(directory / CONFIG_FILE).get("checkpoint.every", True):
        raise ConfigError(f"resume: nothing was saved in {directory}: checkpoint.every = 0")
    return directory


def _newest(name: str) -> Path:
    numbered = {
        int(match[1] or 1): path
        for path in RUNS.glob("*")
        if (match := re.fullmatch(rf"{re.escape(name)}(?:-(\d+))?", path.name))
    }
    if not numbered:
        raise ConfigError(f"resume: no run of {name} in {RUNS.absolute()}; --out names a directory")
    return numbered[max(numbered)]


def _check_unchanged(path: Path, config: RunConfig) -> None:
    free = FREE_WHILE_CHOOSING if config.rollout.draft_lengths else FREE_ON_RESUME
    wanted, stored = _as_stored(config), _stored(path)
    # An option newer than the stored run counts as its default.
    defaults = _as_stored(RunConfig(name=config.name, steps=config.steps))
    for name in [*wanted, *stored]:
        was, now = stored.get(name, defaults.get(name, "absent")), wanted.get(name, "absent")
        if was != now and not {name, name.partition(".")[0]} & set(free):
            raise ConfigError(
                f"{name} = {now}: the run to resume has {was} ({path}); only {', '.join(free)} may change"
            )


def _stored(path: Path) -> dict[str, Any]:
    try:
        return _flat(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"resume: cannot read {path}: {error}") from None


def _as_stored(config: RunConfig) -> dict[str, Any]:
    return _flat(json.loads(json.dumps(dataclasses.asdict(config))))


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested dicts: {"a": {"b": 1}} -> {"a.b": 1}."""
    leaves = {}
    for name, value in tree.items():
        leaves |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return leaves

"""The directory of a run: which it is, and what of a run may change when it is continued."""

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

# What may change: the updates of the steps to come stay as they would have been, up to rounding.
FREE_ON_RESUME = (
    *("steps", "out", "resume", "probe_every", "print_every", "profile_step"),
    *("gap_alarm", "max_skipped"),
    *("log", "eval", "checkpoint", "speedup", "mesh"),
    # How a step is laid out in time and memory, which another mesh may want otherwise.
    *("microbatches", "ladder", "logit_chunk", "model.remat", "reward.workers"),
)
# Where draft lengths are chosen, that is by what rounds cost, on the mesh that they were timed on and as of the probes.
FREE_WHILE_CHOOSING = tuple(name for name in FREE_ON_RESUME if name not in ("mesh", "probe_every"))


def open_run(config: RunConfig, report: Callable[[str], None] = print) -> Path:
    """The directory of a new run, made, or with `resume` that of the run to continue; its config.json says `config`.

    report: told of each save of the run to continue that is damaged, and out of the way now.

    Raises ConfigError where a new run would overwrite one, where none of the saves to resume from is whole, and where
    the run to resume had another configuration, but for what may change.
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

    Raises ConfigError where no run began, and where it was not to save anything.
    """
    return config.resume and bool(saved_steps(_existing(config) / CHECKPOINTS))


def params_of(checkpoint: str | None, experiment: Experiment, which: Which = "newest") -> Params:
    """Those that `restore_params` reads, or the networks as the recipe starts them."""
    return experiment.networks.params if checkpoint is None else restore_params(Path(checkpoint), experiment, which)


def cut_lines(path: Path, last: int, *, every: bool = False) -> int | None:
    """Drop the lines of a JSONL file after step `last`, and one that a killed process left unfinished.

    every: a step may have several lines; otherwise its last one stays. Returns the last step left.
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
    """The networks of a run's save, on the mesh of `experiment`, without what the drafter remembers of its prompts.

    Raises ConfigError, which speaks of the option `checkpoint`, where there is no save of such networks.
    """
    with _saves(directory) as saves:
        params, extra = saves.restore_params(_abstract(experiment.networks.params), which)
    if extra["draft_vocabulary"] != experiment.draft_vocabulary:
        raise ConfigError(f"checkpoint = {directory}: the problems are others, and with them the draft's vocabulary")
    return params


def restore_policy(directory: Path, experiment: Experiment, which: Which = "newest") -> PyTree:
    """The policy alone of what `restore_params` reads, whatever the draft beside it."""
    with _saves(directory) as saves:
        return saves.restore_policy(_abstract(experiment.networks.params.policy), which)


def saved_step(directory: Path, which: Which = "newest") -> int:
    """The step of the save that `restore_params` reads."""
    with _saves(directory) as saves:
        return saves.step_of(which)


@contextlib.contextmanager
def _saves(directory: Path) -> Iterator[Checkpointer]:
    """Those of a run, to read. A ConfigError speaks of the option `checkpoint`, where there are none such."""
    if not (directory / CHECKPOINTS).is_dir():
        raise ConfigError(f"checkpoint = {directory}: no {CHECKPOINTS} there")
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
        # Of two runs that start at once, the one that makes the directory has it.
        with contextlib.suppress(FileExistsError):
            directory.mkdir(parents=True)
            return directory
        number += 1


def _holds_a_run(directory: Path) -> bool:
    """Return whether there is something to lose: a run that failed before its first step leaves nothing."""
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
    # An option that the run did not know yet was left at its default.
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
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    leaves = {}
    for name, value in tree.items():
        leaves |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return leaves

"""Checks of paths on the command line, made before the work starts, and the writer of result files."""

import json
import os
from pathlib import Path
from typing import Any

from configs.schema import RunConfig
from launch.errors import ConfigError
from launch.phases.lock import LOCK_FILE
from launch.phases.long_phases import OPTIONS, UNFINISHED
from models.files import write_atomically
from specjax.checkpoint import SCORE, Which
from specjax.checkpoint_integrity import saved_steps

CHECKPOINTS = "checkpoints"
CONFIG_FILE = "config.json"


def check_writable(option: str, path: str | None) -> None:
    """Raise ConfigError if no file can be written at `path`; None passes."""
    if path is None:
        return
    file = Path(path).absolute()
    if file.is_dir():
        raise ConfigError(f"{option} = {path}: is a directory; must be a file")
    if not file.parent.is_dir():
        raise ConfigError(f"{option} = {path}: its directory does not exist")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"{option} = {path}: cannot be written")


def new_output_directory(config: RunConfig, *, goes_on: bool = False) -> Path:
    """Return the directory named by `--out`, without creating it.

    Raises ConfigError unless it is new or empty, or `goes_on`: a stopped process left states in it to continue with.
    """
    if not config.out:
        raise ConfigError(f"out = {config.out!r}: must be the directory to write into")
    out = Path(config.out)
    if goes_on and (out / UNFINISHED / OPTIONS).is_file():
        return out
    allowed = {LOCK_FILE, UNFINISHED} if goes_on else {LOCK_FILE}
    if out.exists() and (not out.is_dir() or {path.name for path in out.iterdir()} - allowed):
        raise ConfigError(f"out = {out}: exists and is not an empty directory")
    return out


def check_policy_source(config: RunConfig, checkpoint: str | None) -> None:
    """Raise ConfigError if neither a checkpoint nor model.path is set: the policy would have random weights."""
    if checkpoint is None and config.model.path is None:
        raise ConfigError("checkpoint = None: must be a run directory, or model.path must be set to a policy")


def check_checkpoint(run: str | None, which: Which) -> None:
    """Raise ConfigError if the run directory holds no such checkpoint. Does not read the checkpoint; None passes."""
    if run is None:
        return
    directory = Path(run) / CHECKPOINTS
    steps = saved_steps(directory)
    if not steps:
        missing = f"holds no {CHECKPOINTS}" if Path(run).is_dir() else "no such directory"
        raise ConfigError(f"checkpoint = {run}: {missing}; must be the directory of a run with a checkpoint")
    allowed = ", ".join(map(str, steps))
    if which == "best" and not any((directory / str(step) / SCORE).is_dir() for step in steps):
        raise ConfigError(f"checkpoint_step = best: no checkpoint in {run} has a score; must be newest or {allowed}")
    if isinstance(which, int) and which not in steps:
        raise ConfigError(f"checkpoint_step = {which}: not in {run}; must be newest, best or {allowed}")


def write_results(path: str | Path | None, results: dict[str, Any]) -> None:
    """Write the results as a JSON file; None writes nothing."""
    if path is not None:
        write_atomically(Path(path), json.dumps(results, indent=2) + "\n")

"""Fix what may mean something else to the next process: a run's newest checkpoint, and the newest commit on the hub."""

from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from configs.override import override
from configs.schema import RunConfig
from launch.data.hub import Kind, hub_name, with_commit
from launch.run.history import CONFIG_FILE
from launch.run.networks import saved_step
from launch.run.records import read_recorded
from specjax.parallel import processes

# Options of a program with `checkpoint` and `checkpoint_step`.
Args = TypeVar("Args", bound=Any)

READ: dict[str, Kind] = {
    "model.path": "model",
    "draft.path": "model",
    "data.train": "dataset",
    "data.held_out": "dataset",
}


def with_step(args: Args) -> Args:
    """Return a program's options with `checkpoint_step` as a number: a run that trains on has another newest one."""
    if args.checkpoint is None:
        return args
    return replace(args, checkpoint_step=processes.agree(saved_step(Path(args.checkpoint), args.checkpoint_step)))


def with_commits(config: RunConfig, run: str | Path | None = None) -> RunConfig:
    """Return the configuration with a commit in each name on the hub, as config.json records it.

    run: directory of a run. A name that the run has too, and that is given without a revision, gets the run's commit,
    also if the hub has a newer one. None: no run.
    """
    return override(config, processes.on_primary(lambda: _commits(config, run)))


def _commits(config: RunConfig, run: str | Path | None) -> dict[str, str]:
    """Return the names with their commits, by option."""
    path = None if run is None else Path(run) / CONFIG_FILE
    recorded = read_recorded(path, "checkpoint") if path is not None and path.exists() else {}
    values = dict[str, str]()
    for option, kind in READ.items():
        section, _, field = option.partition(".")
        given = getattr(getattr(config, section), field)
        if given is not None:
            values[option] = _of_run(given, recorded.get(option), kind) or with_commit(given, kind)
    return values


def _of_run(given: str, recorded: Any, kind: Kind) -> str | None:
    """Return the name that the run recorded if it is the given one but for its commit; None otherwise."""
    name = hub_name(given, kind)
    theirs = hub_name(recorded, kind) if isinstance(recorded, str) else None
    if name is None or theirs is None or name.revision is not None:
        return None
    return recorded if (name.repo, name.subset, name.split) == (theirs.repo, theirs.subset, theirs.split) else None

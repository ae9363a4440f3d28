"""Fix what may mean something else to the next process: newest checkpoints, newest commits on the hub, the time."""

from dataclasses import replace
from datetime import datetime
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


def with_commits(config: RunConfig, run: str | Path | None = None, starts: bool = False) -> RunConfig:
    """Return the configuration with a commit in each name on the hub, and the time that chat templates show.

    run:    directory of a run. A name that the run has too, and that is given without a revision, gets the run's
            commit, also if the hub has a newer one. The time is the run's too. None: no run.
    starts: fix the time if no run has one, because a run starts.
    """
    return override(config, processes.on_primary(lambda: _pinned(config, run, starts)))


def _pinned(config: RunConfig, run: str | Path | None, starts: bool) -> dict[str, str | None]:
    """Return the names with their commits, and the time, by option."""
    path = None if run is None else Path(run) / CONFIG_FILE
    recorded = read_recorded(path, "checkpoint") if path is not None and path.exists() else {}
    values = dict[str, str | None]()
    for option, kind in READ.items():
        section, _, field = option.partition(".")
        given = getattr(getattr(config, section), field)
        if given is not None:
            values[option] = _of_run(given, recorded.get(option), kind) or with_commit(given, kind)
    if config.data.tokenizer == "checkpoint" and config.data.chat_template_time is None:
        now = datetime.now().isoformat(timespec="seconds") if starts else None
        values["data.chat_template_time"] = recorded.get("data.chat_template_time") or now
    return values


def _of_run(given: str, recorded: Any, kind: Kind) -> str | None:
    """Return the name that the run recorded if it is the given one but for its commit; None otherwise."""
    name = hub_name(given, kind)
    theirs = hub_name(recorded, kind) if isinstance(recorded, str) else None
    if name is None or theirs is None or name.revision is not None:
        return None
    return recorded if (name.repo, name.subset, name.split) == (theirs.repo, theirs.subset, theirs.split) else None

"""Fix what may mean something else to the next process: newest checkpoints, newest commits on the hub, the time.

A run's adapters are described in the run, too.
"""

from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from configs.from_json import from_json
from configs.override import override
from configs.schema import RunConfig
from launch.cli.paths import CONFIG_FILE
from launch.data.hub import Kind, hub_name, with_commit
from launch.run.networks import saved_step
from launch.run.records import read_recorded
from specjax.parallel import processes

# Options of a program with `checkpoint` and `checkpoint_step`.
Args = TypeVar("Args", bound=Any)

READ: dict[str, Kind] = {
    "model.path": "model",
    "draft.path": "model",
    "lora.path": "model",
    "teacher.path": "model",
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
            commit, also if the hub has a newer one. The time is the run's too, and so is `lora` unless it is given.
            None: no run.
    starts: a run starts or goes on: fix the time if no run has one, and take `lora` as it is given.
    """
    values = processes.on_primary(lambda: _pinned(config, run, starts))
    return override(config, {name: from_json(Any, value) for name, value in values.items()})


def _pinned(config: RunConfig, run: str | Path | None, starts: bool) -> dict[str, Any]:
    """Return the names with their commits, and the time, by option."""
    path = None if run is None else Path(run) / CONFIG_FILE
    recorded = read_recorded(path, "checkpoint") if path is not None and path.exists() else {}
    values = dict[str, Any]()
    for option, kind in READ.items():
        section, _, field = option.partition(".")
        given = getattr(getattr(config, section), field)
        if given is not None:
            theirs = recorded.get(option)
            theirs = theirs if isinstance(theirs, list) else [theirs]
            pinned = [
                _of_run(path, theirs, kind) or with_commit(path, kind)
                for path in ([given] if isinstance(given, str) else given)
            ]
            values[option] = pinned[0] if isinstance(given, str) else tuple(pinned)
    if config.data.tokenizer == "checkpoint" and config.data.chat_template_time is None:
        now = datetime.now().isoformat(timespec="seconds") if starts else None
        values["data.chat_template_time"] = recorded.get("data.chat_template_time") or now
    if not starts and not config.lora.enabled:
        values |= {name: value for name, value in recorded.items() if name.startswith("lora.")}
    return values


def _of_run(given: str, recorded: list[Any], kind: Kind) -> str | None:
    """Return the name that the run recorded if one is the given name but for its commit; None otherwise."""
    name = hub_name(given, kind)
    if name is None or name.revision is not None:
        return None
    names = {path: hub_name(path, kind) for path in recorded if isinstance(path, str)}
    return next((path for path, theirs in names.items() if theirs and replace(theirs, revision=None) == name), None)

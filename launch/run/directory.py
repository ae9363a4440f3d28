"""Run directories: choose one, lock it, and check which options a resumed run may change."""

import contextlib
import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from configs.schema import RunConfig
from launch.cli.paths import CHECKPOINTS, CONFIG_FILE
from launch.errors import ConfigError, as_config_error
from launch.phases.lock import exclusive
from launch.phases.long_phases import UNFINISHED
from launch.run.history import EVENTS_FILE, METRICS_FILE, records_of
from launch.run.records import differences, read_recorded
from models.files import check_file, write_atomically
from specjax.checkpoint_integrity import DamagedSave, saved_steps, set_damaged_aside
from specjax.parallel import processes
from specjax.train.draft.schedule import DraftTrainingConfig

RUNS = Path("runs")

# Options that a resumed run may change: up to rounding, they do not affect the updates of later steps.
FREE_ON_RESUME = (
    *("steps", "out", "resume", "probe_every", "print_every", "profile_step"),
    *("gap_alarm", "max_skipped"),
    *("log", "eval", "checkpoint", "speedup", "mesh"),
    # The layout of a step in time and memory, which another mesh may need to change.
    *("microbatches", "ladder", "logit_chunk", "model.remat", "reward.workers", "reward.code"),
    # rollout.stop_tokens and rollout.stop_strings hold all there are, and the checkpoint a checksum of the prompts.
    *("rollout.replace_stop_tokens", "data.chat_template_time", "data.held_out_count"),
)
# Options to which building the tokenizer adds the model's.
STOPS = ("rollout.stop_tokens", "rollout.stop_strings")
# With automatic draft lengths these stay fixed too: costs were measured on this mesh, at these probes.
FREE_WHILE_CHOOSING = tuple(name for name in FREE_ON_RESUME if name not in ("mesh", "probe_every"))


@contextlib.contextmanager
def open_run(config: RunConfig) -> Iterator[Path]:
    """Yield the directory of a new run, or with `resume` of the run to continue, locked as long as the block runs.

    Raises ConfigError if a new run would overwrite another, if there is no run to resume or its checkpoints are gone,
    if another process is writing to the directory, and if not all processes of the job see it.
    """
    if config.out == "":
        raise ConfigError("out = '': must name a directory")
    with contextlib.ExitStack() as stack:
        directory = Path(processes.on_primary(lambda: str(_locked(config, stack))))
        blind = [number for number, found in enumerate(processes.gather(directory.is_dir())) if not found]
        if blind:
            raise ConfigError(f"out = {directory}: must be shared by all hosts; process {blind[0]} does not see it")
        yield directory


def _locked(config: RunConfig, stack: contextlib.ExitStack) -> Path:
    """Return the directory that `open_run` yields, whose lock enters `stack`."""
    if config.resume:
        directory = _existing(config)
        stack.enter_context(exclusive("out", directory))
        _check_files(directory)
        _check_checkpoints(directory)
    elif config.out is None:
        directory = _next(config.name, stack)
    else:
        directory = Path(config.out)
        stack.enter_context(exclusive("out", directory))
        _check_files(directory)
        if _holds_a_run(directory):
            raise ConfigError(f"out = {directory}: holds a run already; --resume, in Python resume=True, continues it")
    return directory


def _check_files(directory: Path) -> None:
    """Raise ConfigError unless all files of a run are regular: reading or writing a pipe may never end."""
    with as_config_error():
        for path in directory.iterdir():
            if path.exists() and (not path.is_dir() or path.suffix in (".json", ".jsonl")):
                check_file(path)


def can_resume(config: RunConfig, directory: Path) -> bool:
    """Return whether a run resumes from a checkpoint. One that ended before its first one starts from scratch."""
    return config.resume and bool(processes.agree(saved_steps(directory / CHECKPOINTS)))


def check_resumable(directory: Path, config: RunConfig) -> None:
    """Raise ConfigError, with a line for each option that must be that of the run to resume, before anything is loaded.

    Options that follow from tokenizer and networks are compared by `record_config`.
    """
    if config.resume:
        processes.on_primary(lambda: _check_given(directory / CONFIG_FILE, config))


def _check_given(path: Path, config: RunConfig) -> None:
    """Raise ConfigError for options that differ, but for those that building the experiment may make equal."""
    # What it makes of the options of a draft without parameters.
    built = dataclasses.replace(config, draft_training=DraftTrainingConfig(mode="frozen"))
    same = not any(name.startswith("draft_training.") for name, *_ in differences(built, read_recorded(path, "resume")))
    _check_unchanged(path, config, later=(*STOPS, "draft_training") if same else STOPS)


def record_config(directory: Path, config: RunConfig, report: Callable[[str], None] = print) -> None:
    """Write the resolved configuration to config.json, and report where the run is.

    report: called with a line, also for each damaged checkpoint that was renamed out of the way.

    Raises ConfigError if every checkpoint to resume from is damaged, or if an option that must not change differs from
    the run to resume.
    """
    processes.on_primary(lambda: _record_config(directory, config, report))


def _record_config(directory: Path, config: RunConfig, report: Callable[[str], None]) -> None:
    if config.resume:
        _check_unchanged(directory / CONFIG_FILE, config)
        _report_other_reward(directory / CONFIG_FILE, config, report)
        try:
            for damaged in set_damaged_aside(directory / CHECKPOINTS):
                report(damaged)
        except DamagedSave as error:
            raise ConfigError(f"resume: {error}") from error
    write_atomically(directory / CONFIG_FILE, json.dumps(dataclasses.asdict(config), indent=2) + "\n")
    report(f"run directory: {directory}")


def _next(name: str, stack: contextlib.ExitStack) -> Path:
    """Lock runs/NAME, or the next free of runs/NAME-2, -3, ..: if two runs start at once, each gets its own."""
    for number in itertools.count(1):
        directory = RUNS / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            stack.enter_context(exclusive("out", directory, new=True))
            return directory
    raise AssertionError


def _holds_a_run(directory: Path) -> bool:
    """Return whether the directory has metrics, checkpoints, or a warm-up or distillation that was stopped."""
    metrics, checkpoints = directory / METRICS_FILE, directory / CHECKPOINTS
    return (
        (directory / UNFINISHED).exists()
        or (metrics.is_file() and metrics.stat().st_size > 0)
        or (checkpoints.is_dir() and any(checkpoints.iterdir()))
    )


def _existing(config: RunConfig) -> Path:
    directory = _newest(config.name) if config.out is None else Path(config.out)
    if not directory.is_dir():
        raise ConfigError(f"resume: out = {directory}: must be the directory of a run")
    return directory


def _check_checkpoints(directory: Path) -> None:
    """Raise ConfigError if the run saves none, or if those that it saved are gone: its history would start again."""
    if saved_steps(directory / CHECKPOINTS) or (directory / UNFINISHED).exists():
        return
    if not read_recorded(directory / CONFIG_FILE, "resume").get("checkpoint.every", True):
        raise ConfigError(f"resume: nothing was saved in {directory}: checkpoint.every = 0")
    saved = [record["step"] for record in records_of(directory / EVENTS_FILE) if "checkpoint" in record]
    if saved:
        raise ConfigError(
            f"resume: {directory / CHECKPOINTS}: the checkpoints are gone, the newest was of step {max(saved)}; "
            "must be there, or start a new run with another --out"
        )


def _newest(name: str) -> Path:
    numbered = {
        int(match[1] or 1): path
        for path in RUNS.glob("*")
        if (match := re.fullmatch(rf"{re.escape(name)}(?:-(\d+))?", path.name)) and (path / CONFIG_FILE).exists()
    }
    if not numbered:
        raise ConfigError(f"resume: no run of {name} in {RUNS.absolute()}; --out names a directory")
    return numbered[max(numbered)]


def _check_unchanged(path: Path, config: RunConfig, later: Collection[str] = ()) -> None:
    """Raise ConfigError, with a line for each option that must be that of the run to resume and is not.

    path:  config.json of that run.
    later: options, or sections of them, that are not compared.
    """
    free = FREE_WHILE_CHOOSING if config.rollout.draft_lengths else FREE_ON_RESUME
    if config.rollout.carry_over is not None:
        # Unfinished sequences stay on their data shard, which has room only for its own.
        free = tuple(name for name in free if name != "mesh")
    refused = [
        f"{name} = {now}: the run to resume has {was} ({path})"
        for name, now, was in differences(config, read_recorded(path, "resume"))
        if not {name, name.partition(".")[0]} & {*free, *later}
    ]
    if refused:
        refused[-1] += f"; only {', '.join(free)} may change"
        raise ConfigError(*refused)


def _report_other_reward(path: Path, config: RunConfig, report: Callable[[str], None]) -> None:
    """Report a reward whose code is another one than that of the run with this config.json."""
    codes = {config.reward.code, read_recorded(path, "resume").get("reward.code")}
    if len(codes - {None}) > 1:
        scorers = ", ".join(config.reward.names)
        report(f"reward = {scorers}: has other code than in the steps so far; the new one scores later steps")

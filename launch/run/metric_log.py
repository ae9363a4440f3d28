"""Log the metrics of every step to metrics.jsonl, TensorBoard, the console, and optionally Weights & Biases."""

import dataclasses
import importlib
import json
import math
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.summary import scalar

from configs.schema import RunConfig
from launch.console import console
from launch.errors import ConfigError, first_line
from launch.run.console import StepPrinter
from launch.run.history import METRICS_FILE, cut_after
from specjax.parallel import processes

# The id under which a resumed run goes on at Weights & Biases.
WANDB_ID_FILE = "wandb_id"

Log = Callable[[int, Mapping[str, float]], None]
# Called with a step and a line.
Warn = Callable[[int, str], None]
# What a package of others may raise where a run must go on. One that asks on a terminal may exit without one.
FAILURES = (Exception, SystemExit)

# Every line of metrics.jsonl has these metrics; null if a step did not measure one. Other metrics follow them.
STANDARD_METRICS = (
    *("reward/mean", "reward/std", "reward/accuracy", "reward/failed", "reward/overlong"),
    *("eval/accuracy", "eval/truncated"),
    *("loss/policy", "loss/draft", "loss/clip_fraction", "ratio/mean", "ratio/max", "kl/reference", "entropy"),
    *("grad_norm/policy", "grad_norm/draft", "update/skipped", "update/empty", "draft/skipped", "draft/trained"),
    *("learning_rate/policy", "learning_rate/draft"),
    *("memory/peak_gib", "memory/host_gib", "memory/host_peak_gib"),
    *("groups/zero_variance", "groups/sequences_trained", "groups/sequences_with_advantage"),
    *("rollout/tokens", "rollout/rounds", "rollout/length_mean", "rollout/length_max", "rollout/truncated"),
    *("rollout/empty", "rollout/draft_length", "rollout/acceptance_length"),
    *("draft/predicted_acceptance", "draft/promised_acceptance", "draft/measured_acceptance", "draft/alarm"),
    *("rollout/logprob_gap_mean", "rollout/logprob_gap_max", "rollout/logprob_alarm"),
    *("rollout/sequence_logprob_gap_mean", "rollout/sequence_logprob_gap_max"),
    *("time/data", "time/prepare", "time/generation", "time/reward", "time/logprob", "time/train", "time/step"),
    "time/draft_training",
    *("perf/generation_tokens_per_s", "perf/speedup_vs_autoregressive"),
)


class MetricLog:
    """Writes the metrics of each step of the run in `directory`. Only the primary process writes.

    print_every: print averages over every n steps.
    resume_step: the restored step. Lines of later steps are dropped, so that none appears twice. None drops all.
    also:        another log, called with a step and the values that it measured. It may fail, as may TensorBoard's.
    warn:        called at the first failure of each of them.
    last_step:   last step of the run; shown with the time left.
    rollout_function: the run's own; alarms name it.
    last_logged: the last step of the file, None if it has none.
    """

    def __init__(
        self,
        directory: Path,
        print_every: int = 1,
        resume_step: int | None = None,
        also: Log | None = None,
        warn: Warn = lambda step, text: console.print(text),
        last_step: int | None = None,
        rollout_function: str | None = None,
    ) -> None:
        path = directory / METRICS_FILE
        self.last_logged = cut_after(path, -1 if resume_step is None else resume_step, report=console.print)
        self._file = (path if processes.primary() else Path(os.devnull)).open("a", encoding="utf-8")
        self._events = EventFile(directory, 0 if resume_step is None else resume_step + 1)
        self._others = [_forgiving("TensorBoard", self._events.log, warn)] if processes.primary() else []
        self._others += [] if also is None else [_forgiving("Weights & Biases", also, warn)]
        self._print = StepPrinter(print_every, directory, last_step, rollout_function)

    def __enter__(self) -> "MetricLog":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
        with suppress(OSError):
            self._events.close()

    def log(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float | None]:
        """Write the scalar metrics of a step, and return the values as written.

        Values that are not finite become null, because JSON has no such numbers. Raises ValueError for a value that is
        not a scalar, and for a step that is not after the last one.
        """
        if self.last_logged is not None and step <= self.last_logged:
            raise ValueError(f"step = {step}: must be after {self.last_logged}, the last logged step")
        fetched = processes.fetch(dict(metrics))
        values = dict.fromkeys(STANDARD_METRICS) | {name: _number(name, value) for name, value in fetched.items()}
        self.last_logged = step
        self._file.write(json.dumps({"step": step} | values) + "\n")
        self._file.flush()
        measured = {name: value for name, value in values.items() if value is not None}
        for log in self._others:
            log(step, measured)
        self._print(step, values)
        return values


class EventFile:
    """A file of TensorBoard's, opened when the first step is logged. Every call may raise OSError.

    start: the first step. TensorBoard drops what earlier files of the directory have of it and of later ones.
    """

    def __init__(self, directory: Path, start: int) -> None:
        self._directory, self._start = directory, start
        self._writer: EventsWriter | None = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        writer = self._writer = self._writer or self._open()
        parts = [part for name, value in values.items() for part in scalar(name, value).value]
        writer.write_event(Event(wall_time=time.time(), step=step, summary=Summary(value=parts)))
        writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _open(self) -> EventsWriter:
        # TensorBoard names files by the second, and a run may resume twice within one: the step makes names unique.
        writer = EventsWriter(str(self._directory / "events"), f".{self._start}")
        start = SessionLog(status=SessionLog.START)
        writer.write_event(Event(wall_time=time.time(), step=self._start, session_log=start))
        return writer


def check_wandb(project: str | None) -> None:
    """Raise ConfigError if a project is named but wandb is not installed."""
    if project is not None:
        _load_wandb(project)


@contextmanager
def wandb_log(config: RunConfig, directory: Path) -> Iterator[Log | None]:
    """Yield a function (step, metrics) that logs to Weights & Biases; None without a project, or if not the primary.

    A resumed run continues under its id, stored in `wandb_id` in its directory. Steps logged before it was killed keep
    their first values.

    Raises ConfigError, in every process, if Weights & Biases cannot be reached.
    """
    project, runs = config.log.wandb_project, list[Any]()
    if project is not None:
        processes.on_primary(lambda: runs.append(_start_wandb(project, config, directory)))
    if not runs:
        yield None
        return
    (run,) = runs
    try:
        yield lambda step, values: run.log(dict(values), step=step)
    finally:
        _forgiving("Weights & Biases", lambda step, values: run.finish(), lambda step, text: console.print(text))(0, {})


def _start_wandb(project: str, config: RunConfig, directory: Path) -> Any:
    wandb, path = _load_wandb(project), directory / WANDB_ID_FILE
    try:
        name = path.read_text(encoding="utf-8") if config.resume and path.exists() else uuid.uuid4().hex
        fields = {"project": project, "name": directory.name, "dir": str(directory)}
        run = wandb.init(**fields, config=dataclasses.asdict(config), id=name, resume="allow")
        path.write_text(name, encoding="utf-8")
    except FAILURES as error:
        raise ConfigError(
            f"log.wandb_project = {project}: wandb does not start: {_reason(error)}; must be a project that you may "
            "write to, or None"
        ) from error
    return run


def _forgiving(name: str, log: Log, warn: Warn) -> Log:
    """Return a log that turns the first failure of `log` into a warning, and ignores later ones."""
    failed = False

    def attempt(step: int, values: Mapping[str, float]) -> None:
        nonlocal failed
        try:
            log(step, values)
        except FAILURES as error:
            if not failed:
                warn(step, f"{name} failed: {_reason(error)}; the run goes on, with all metrics in {METRICS_FILE}")
            failed = True

    return attempt


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}".removesuffix(": ")


def _load_wandb(project: str) -> Any:
    try:
        return importlib.import_module("wandb")
    except ImportError:
        raise ConfigError(
            f"log.wandb_project = {project}: wandb is not installed: pip install -e '.[wandb]' in a clone"
        ) from None
    except FAILURES as error:
        raise ConfigError(f"log.wandb_project = {project}: wandb cannot be imported: {_reason(error)}") from error


def _number(name: str, value: Any) -> float | int | None:
    if name == "step":
        raise ValueError("step: must not be the name of a metric")
    if getattr(value, "size", 1) != 1:
        raise ValueError(f"{name}: has shape {value.shape}, a metric must be a scalar")
    number = value.item() if hasattr(value, "item") else value
    return None if number is None or not math.isfinite(number) else number

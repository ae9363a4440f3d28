"""Log the metrics of every step to metrics.jsonl, TensorBoard, the console, and optionally Weights & Biases."""

import dataclasses
import importlib
import json
import math
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

from configs.schema import RunConfig
from launch.cli.console import console
from launch.cli.errors import ConfigError
from launch.run.console import StepPrinter
from launch.run.history import METRICS_FILE, cut_after
from specjax.parallel import processes

# The id under which a resumed run goes on at Weights & Biases.
WANDB_ID_FILE = "wandb_id"

Log = Callable[[int, Mapping[str, float]], None]

# Every line of metrics.jsonl has these metrics; null if a step did not measure one. Other metrics follow them.
STANDARD_METRICS = (
    *("reward/mean", "reward/std", "reward/accuracy", "reward/failed", "reward/overlong", "eval/accuracy"),
    *("loss/policy", "loss/draft", "loss/clip_fraction", "ratio/mean", "ratio/max", "kl/reference", "entropy"),
    *("grad_norm/policy", "grad_norm/draft", "update/skipped", "draft/skipped", "draft/trained"),
    *("learning_rate/policy", "learning_rate/draft", "memory/peak_gib"),
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
    also:        another log, called with a step and the values that it measured.
    last_step:   last step of the run; shown with the time left.
    """

    def __init__(
        self,
        directory: Path,
        print_every: int = 1,
        resume_step: int | None = None,
        also: Log | None = None,
        last_step: int | None = None,
    ) -> None:
        path = directory / METRICS_FILE
        self._last = cut_after(path, -1 if resume_step is None else resume_step, report=console.print)
        self._file = (path if processes.primary() else Path(os.devnull)).open("a", encoding="utf-8")
        # TensorBoard names files by the second, and a run may resume twice within one: the step makes names unique.
        start = 0 if resume_step is None else resume_step + 1
        self._events = SummaryWriter(
            str(directory), purge_step=start, filename_suffix=f".{start}", write_to_disk=processes.primary()
        )
        self._print, self._also = StepPrinter(print_every, last_step), also

    def __enter__(self) -> "MetricLog":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
        self._events.close()

    def log(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float | None]:
        """Write the scalar metrics of a step, and return the values as written.

        Values that are not finite become null, because JSON has no such numbers. Raises ValueError for a value that is
        not a scalar, and for a step that is not after the last one.
        """
        if self._last is not None and step <= self._last:
            raise ValueError(f"step = {step}: must be after {self._last}, the last logged step")
        fetched = processes.fetch(dict(metrics))
        values = dict.fromkeys(STANDARD_METRICS) | {name: _number(name, value) for name, value in fetched.items()}
        self._last = step
        self._file.write(json.dumps({"step": step} | values) + "\n")
        self._file.flush()
        measured = {name: value for name, value in values.items() if value is not None}
        for name, value in measured.items():
            self._events.add_scalar(name, value, step)
        self._events.flush()
        if self._also is not None:
            self._also(step, measured)
        self._print(step, values)
        return values


def check_wandb(project: str | None) -> None:
    """Raise ConfigError if a project is named but wandb is not installed."""
    if project is not None:
        _load_wandb(project)


@contextmanager
def wandb_log(config: RunConfig, directory: Path) -> Iterator[Log | None]:
    """Yield a function (step, metrics) that logs to Weights & Biases; None without a project, or if not the primary.

    A resumed run continues under its id, stored in `wandb_id` in its directory. Steps logged before it was killed keep
    their first values.
    """
    project = config.log.wandb_project
    if project is None or not processes.primary():
        yield None
        return
    path = directory / WANDB_ID_FILE
    if not (config.resume and path.exists()):
        path.write_text(uuid.uuid4().hex, encoding="utf-8")
    run = _load_wandb(project).init(
        project=project,
        name=directory.name,
        dir=str(directory),
        config=dataclasses.asdict(config),
        id=path.read_text(encoding="utf-8"),
        resume="allow",
    )
    try:
        yield lambda step, values: run.log(dict(values), step=step)
    finally:
        run.finish()


def _load_wandb(project: str) -> Any:
    try:
        return importlib.import_module("wandb")
    except ImportError:
        raise ConfigError(
            f"log.wandb_project = {project}: wandb is not installed: pip install 'specjax[wandb]'"
        ) from None


def _number(name: str, value: Any) -> float | int | None:
    if name == "step":
        raise ValueError("step: must not be the name of a metric")
    if getattr(value, "size", 1) != 1:
        raise ValueError(f"{name}: has shape {value.shape}, a metric must be a scalar")
    number = value.item() if hasattr(value, "item") else value
    return None if number is None or not math.isfinite(number) else number

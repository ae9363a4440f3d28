"""The logs of a run: its events, sample completions and metrics, opened and closed together."""

import datetime
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import jax
import numpy as np

from launch.console import console
from launch.data.prompts import prompt_text
from launch.data.tokenizers import token_texts
from launch.environments.parts import conversation_record
from launch.phases.run_clock import describe_seconds, run_seconds
from launch.phases.signals import StopSignals
from launch.rewards.reward_fn import final_answers
from launch.run.draft_monitor import DraftShare, DraftSpeed, DraftSwitches, first_step_check
from launch.run.history import EVENTS_FILE, SAMPLES_FILE, cut_after, missing_history
from launch.run.learning_checks import CutCompletions, LearningSignal
from launch.run.metric_log import Log, MetricLog
from launch.run.step_checks import RouterLoad, SkippedUpdates, check_lag
from launch.run.step_timer import StepTimer
from launch.run.summary import next_look
from launch.setup.experiment import Experiment
from specjax.parallel import processes
from specjax.types import Prompts, Rollout

PACKAGES = ("specjax", "jax", "flax", "optax", "numpy")
# Fields of `Rollout` that samples are made of.
LOGGED = "tokens", "lengths", "stopped", "writer", "done", "sampled", "ending", "turns", "returns"


class EventLog:
    """Writes one line per event, with the last finished step.

    Events are `start`, `summary`, `warning`, `checkpoint`, `result` and `times`.

    step: the step after which the run starts or resumes. Lines of later steps are dropped.
    """

    def __init__(self, directory: Path, step: int = 0) -> None:
        self._path = directory / EVENTS_FILE
        cut_after(self._path, step, every=True, report=console.print)
        self._write(step, "start", _environment())

    def record_summary(self, step: int, lines: Sequence[str]) -> None:
        """Write what the run is, a line each."""
        self._write(step, "summary", lines)

    def warn(self, step: int, text: str, style: str | None = None) -> None:
        """Print a warning and write it."""
        console.print(text, style=style)
        self.record_warning(step, text)

    def record_warning(self, step: int, text: str) -> None:
        """Write a warning that is printed elsewhere."""
        self._write(step, "warning", text)

    def record_checkpoint(self, step: int) -> None:
        """Write that the checkpoint of a step is complete: if no checkpoint is there later, they were removed."""
        self._write(step, "checkpoint", "complete")

    def record_result(self, step: int, **values: float) -> None:
        """Write results that were measured after the last step."""
        self._write(step, "result", values)

    def record_times(self, step: int, seconds: Mapping[str, float]) -> None:
        """Print and write the seconds of the parts of this process."""
        console.print(describe_seconds(seconds))
        self._write(step, "times", seconds)

    def _write(self, step: int, kind: str, value: Any) -> None:
        if processes.primary():
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, kind: value}) + "\n")


class SampleLog:
    """Writes one line per logged step: the lengths of all completions, and the tokens of some.

    resume_step: the restored step. Lines of later steps are dropped. None drops all.
    """

    def __init__(self, directory: Path, experiment: Experiment, resume_step: int | None = None) -> None:
        self._path, self._experiment = directory / SAMPLES_FILE, experiment
        config = experiment.config
        problems = experiment.problems.train
        self._final_answer = final_answers(config, experiment.tokenizer, problems) if config.log.samples > 0 else None
        cut_after(self._path, -1 if resume_step is None else resume_step, report=console.print)

    def due(self, step: int, last: bool) -> bool:
        """Return whether to log this step: the first, the last, those evaluated or saved, and every n-th."""
        config = self._experiment.config
        intervals = config.eval.every, config.checkpoint.every, config.log.samples_every
        regular = any(every > 0 and step % every == 0 for every in intervals)
        return config.log.samples > 0 and (step == 1 or last or regular)

    def write(self, step: int, prompts: Prompts, rollout: Rollout) -> None:
        """Append one line to samples.jsonl.

        The line is {"step", "budget", "lengths": [..], "completions": [{"prompt", "answer", "extracted", "reward",
        "advantage", "stopped", "pieces": [[text, specjax.types.Writer], ..]}, ..]}. Completions of different prompts
        come first. Unknown values are null: the reward of a sample that was not scored, the answer extracted from one,
        or by a scorer that extracts none, the advantage where some rows were left out of training, `stopped` of one
        that goes on in the next step, writers that a custom rollout function does not report. With an environment,
        completions have the fields of `launch.environments.parts.conversation_record` too.
        """
        # Indexed on the host: a program of the prompts' mesh would wait for the rollout under way there, and a process
        # without a device of the mesh has nothing to index.
        rewards = None if rollout.reward is None else rollout.reward.value
        batch = None if rollout.batch is None else (rollout.batch.advantage, rollout.batch.completion)
        logged = Rollout(**{name: getattr(rollout, name) for name in LOGGED})
        ids, logged, rewards, batch = processes.fetch((prompts.id, logged, rewards, batch))
        count, budget = logged.tokens.shape
        advantages, group = None if batch is None else _advantages(batch[0], batch[1], count), count // len(ids)
        rows = np.arange(count).reshape(-1, group).T.ravel()[: self._experiment.config.log.samples]
        completions = [
            self._completion(int(ids[row // group]), *jax.tree.map(itemgetter(row), (logged, rewards, advantages)))
            for row in rows
        ]
        line = {"step": step, "budget": budget, "lengths": logged.lengths.tolist(), "completions": completions}
        if processes.primary():
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def _completion(self, problem: int, row: Any, reward: Any, advantage: Any) -> dict[str, Any]:
        """Return what is logged of a row of a rollout, whose arrays are of this row only."""
        tokenizer, length = self._experiment.tokenizer, int(row.lengths)
        ids = row.tokens[:length].tolist()
        texts = token_texts(tokenizer, ids)
        written_by = [None] * length if row.writer is None else row.writer[:length].tolist()
        sampled = [True] * length if row.sampled is None else row.sampled[:length].tolist()
        asked = self._experiment.problems.train[problem]
        # The extraction has no time limit: only completions that were scored within it.
        value = None if reward is None or not np.isfinite(reward) else float(reward)
        extract = None if value is None else self._final_answer
        # What was observed is not scored.
        scored = [token for token, drawn in zip(ids, sampled, strict=True) if drawn]
        extracted = None if extract is None else extract(scored, problem)
        conversation = {}
        if row.ending is not None:
            result = int(row.ending), int(row.turns), float(row.returns)
            conversation = conversation_record(tokenizer, ids, sampled, *result)
        return {
            "prompt": prompt_text(asked.prompt),
            "answer": asked.answer,
            # A scorer of one's own may return a number of any type.
            "extracted": None if extracted is None else str(extracted),
            "reward": value,
            "advantage": None if advantage is None else float(advantage),
            "stopped": None if row.stopped is None or row.done is not None and not row.done else bool(row.stopped),
            "pieces": [list(piece) for piece in zip(texts, written_by, strict=True)],
            **conversation,
        }


@dataclass(frozen=True)
class RunLogs:
    """Open logs of a run.

    Attributes:
        directory: Directory of the run.
        events:    Event log: warnings and results.
        samples:   Log of sample completions.
        timer:     Times each step and logs its metrics.
        skipped:   Saves skipped batches; may end the run.
        cut:       Warns of completions and evaluations that the budget cuts.
        signals:   Receives SIGTERM and SIGINT; may end the run.
    """

    directory: Path
    events: EventLog
    samples: SampleLog
    timer: StepTimer
    skipped: SkippedUpdates
    cut: CutCompletions
    signals: StopSignals

    @property
    def must_stop(self) -> bool:
        """True if the run received a signal, or skipped too many updates in a row."""
        return self.signals.received is not None or self.skipped.reason is not None

    def write_samples(self, last: bool) -> None:
        """Write completions of the newest step, if they are due. last: the run ends with this step."""
        step = self.timer.newest
        if step is not None and self.samples.due(step.number, last):
            self.timer.wait()
            self.samples.write(step.number, step.prompts, step.rollout)
        # Its arrays need not stay on the devices during evaluation and saving.
        self.timer.newest = None


@contextmanager
def open_logs(
    experiment: Experiment,
    directory: Path,
    resume_step: int | None,
    signals: StopSignals,
    also: Log | None = None,
) -> Iterator[RunLogs]:
    """Open the logs of a run that resumes after `resume_step`; None: a new run. Entries of later steps are dropped.

    Missing entries of earlier steps are a warning. At the end the times of the run's parts are recorded.

    also: another log of metrics.
    """
    config, last_step = experiment.config, resume_step or 0
    missing = missing_history(directory, last_step, config.log.samples > 0) if last_step else []
    events, skipped = EventLog(directory, last_step), SkippedUpdates(directory, config.max_skipped, last_step)
    for line in missing:
        events.warn(last_step, line)
    outlook = partial(next_look, experiment)
    switches = DraftSwitches(experiment.phases, config.rollout.draft_lengths, events.warn, outlook)
    checks = first_step_check(experiment, directory, events.warn), partial(check_lag, config.asynchronous.lag)
    speed, learning = DraftSpeed(config.rollout, events.warn), LearningSignal(config, events.warn)
    cut, mixture = CutCompletions(config, events.warn), experiment.networks.policy.mixture
    optional = () if mixture is None else (RouterLoad(mixture, events.warn),)
    functions = also, events.warn
    with MetricLog(
        directory, config.print_every, resume_step, *functions, config.steps, config.rollout.function
    ) as metrics:
        timer = StepTimer(DraftShare(metrics.log), (*checks, switches, speed, learning, cut, *optional, skipped))
        samples = SampleLog(directory, experiment, resume_step)
        try:
            yield RunLogs(directory, events, samples, timer, skipped, cut, signals)
        finally:
            if (seconds := run_seconds()) is not None:
                events.record_times(metrics.last_logged or last_step, seconds)


def _advantages(by_token: np.ndarray, completion: np.ndarray, rows: int) -> np.ndarray | None:
    """Return the mean advantage of each sequence's tokens, [rows]; None if fewer rows train."""
    if len(completion) != rows:
        return None
    return by_token.sum(axis=1) / np.maximum(completion.sum(axis=1), 1)


def _environment() -> dict[str, Any]:
    devices = jax.devices()
    installed = {distribution.metadata["Name"] for distribution in importlib.metadata.distributions()}
    versions = {name: importlib.metadata.version(name) for name in PACKAGES if name in installed}
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "device": f"{len(devices)} x {devices[0].device_kind}",
        "host": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {"Python": platform.python_version()} | versions,
    }

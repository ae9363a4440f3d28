"""Time the steps of a run, and log each while the next one runs."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from launch.jobs.silence import note_progress
from specjax.cost import Drafting
from specjax.parallel import processes
from specjax.types import Prompts, Rollout

Metrics = dict[str, Any]


@dataclass
class DispatchedStep:
    """A training step that was dispatched to the device.

    start:    time.perf_counter() when it began, plus the seconds that it compiled for.
    metrics:  contains `time/step` if the step timed itself, as a probe does.
    drafting: the measurements by which its draft lengths were chosen; None at a fixed draft length.
    """

    number: int
    start: float
    metrics: Metrics
    prompts: Prompts
    rollout: Rollout
    drafting: Drafting | None = None


class StepTimer:
    """Times each step and logs it after the next one is dispatched, so that fetching metrics does not stall the device.

    log:       writes metrics and returns the values written.
    observers: called with each step after it is logged.
    logged:    the values of the last logged step.
    newest:    the last dispatched step.
    """

    def __init__(
        self,
        log: Callable[[int, Mapping[str, Any]], dict[str, float | None]],
        observers: Sequence[Callable[[DispatchedStep], None]] = (),
    ) -> None:
        self._log_metrics, self._observers = log, observers
        self.logged: dict[str, float | None] = {}
        self.newest: DispatchedStep | None = None
        self._pending: DispatchedStep | None = None
        self._last_end = 0.0

    def dispatched(self, step: DispatchedStep) -> None:
        """Register a dispatched step, and log the one before it."""
        previous, self._pending, self.newest = self._pending, step, step
        ended = [previous] if previous is not None and "time/step" not in previous.metrics else []
        jax.block_until_ready([each.metrics for each in ended])
        # The call may have run its own step to the end too, as on CPU.
        if "time/step" not in step.metrics and _has_ended(step):
            ended.append(step)
        self._record_times(ended)
        self._log(previous)

    def wait(self) -> None:
        """Wait for the last step and record its time, so that it does not include what follows."""
        step = self._pending
        if step is not None and "time/step" not in step.metrics:
            jax.block_until_ready(step.metrics)
            self._record_times([step])

    def _record_times(self, ended: Sequence[DispatchedStep]) -> None:
        """Record the times of steps that were seen to have ended at the same moment: they share the time since then.

        So no step gets the time of another, and all times sum to the wall clock, less compilation.
        """
        if not ended:
            return
        now = time.perf_counter()
        # A step dispatched while the previous one was running starts when that one ends.
        seconds = (now - max(ended[0].start, self._last_end)) / len(ended)
        for step in ended:
            step.metrics["time/step"] = seconds
            note_progress(f"step {step.number}")
        self._last_end = now

    def log_start(self, metrics: Metrics) -> None:
        """Log what was measured before the first step, as step 0."""
        self._log_metrics(0, metrics)

    def finish(self, more: Metrics | None = None) -> None:
        """Log the last step, with the metrics `more` that were measured after it."""
        self.wait()
        self._log(self._pending, more)
        self._pending = None

    def _log(self, step: DispatchedStep | None, more: Metrics | None = None) -> None:
        if step is not None:
            step.metrics = processes.fetch(step.metrics)
            self.logged = self._log_metrics(step.number, step.metrics | (more or {}))
            for observe in self._observers:
                observe(step)


def _has_ended(step: DispatchedStep) -> bool:
    arrays = (x for x in step.metrics.values() if isinstance(x, jax.Array))
    return all(x.is_ready() for x in arrays)  # pyright: ignore[reportAttributeAccessIssue]

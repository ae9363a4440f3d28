"""The clock of a run's steps, and their way to the log."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from launch.run.draft_alerts import Switches
from launch.run.metric_log import RunLogger
from launch.run.skipped_updates import SkippedUpdates
from specjax.cost import Drafting
from specjax.types import Prompts, Rollout

Values = Mapping[str, Any]
Choice = tuple[jax.Array | None, Drafting] | None
Generated = tuple[Prompts, Rollout]
# Number, begin, metrics, choice and rollout of a step.
Pending = tuple[int, float, dict[str, Any], Choice, Generated | None]


class StepRecord:
    """Times each step, and logs it when the next is under way, so that fetching its metrics stalls nothing."""

    def __init__(
        self,
        logger: RunLogger,
        switches: Switches | None = None,
        first: Callable[[Values], None] | None = None,
        skipped: SkippedUpdates | None = None,
    ) -> None:
        """first: called with the metrics of the first step alone. `logged` is the line of the step last logged."""
        self._logger, self._switches, self._first, self._skipped = logger, switches, first, skipped
        self.logged: dict[str, float | None] = {}
        self._pending: Pending | None = None
        self._done = 0.0

    def dispatched(
        self,
        number: int,
        start: float,
        metrics: dict[str, Any],
        choice: Choice = None,
        generated: Generated | None = None,
    ) -> None:
        """Step `number`, begun at `start`, is on the device: the one before it can be logged.

        choice: the draft lengths of the step, [shards, phases], and what they were chosen by. generated: what the
        metrics are of.
        """
        self.wait()
        previous, self._pending = self._pending, (number, start, metrics, choice, generated)
        # Where calling a step runs it to its end, as on CPU, the next one would only count as a part of this one.
        arrays = (x for x in metrics.values() if isinstance(x, jax.Array))
        if all(x.is_ready() for x in arrays):  # pyright: ignore[reportAttributeAccessIssue]
            self.wait()
        self._log(previous)

    def wait(self) -> None:
        """Let the step last dispatched end, so that what follows is not counted as its time.

        A probe step, or one before it, has timed itself.
        """
        if self._pending is not None and "time/step" not in self._pending[2]:
            _, start, metrics, *_ = self._pending
            jax.block_until_ready(metrics)
            now = time.perf_counter()
            # A step that was dispatched while the one before still ran begins when that one ends.
            metrics["time/step"] = now - max(start, self._done)
            self._done = now

    def finish(self, more: dict[str, float] | None = None) -> None:
        """Log the step last dispatched, with what was measured after it."""
        self.wait()
        self._log(self._pending, more)
        self._pending = None

    def _log(self, step: Pending | None, more: dict[str, float] | None = None) -> None:
        if step is None:
            return
        number, _, metrics, choice, generated = step
        self.logged = self._logger.log(number, metrics | (more or {}))
        if self._first is not None:
            self._first(metrics)
            self._first = None
        if self._switches is not None and choice is not None:
            lengths, drafting = jax.device_get(choice)
            self._switches(number, lengths[0].tolist(), drafting, metrics)
        if self._skipped is not None and generated is not None:
            self._skipped(number, metrics, *generated)

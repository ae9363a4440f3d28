"""The share of the step that training the draft takes."""

import statistics
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

Log = Callable[[int, Mapping[str, Any]], dict[str, float | None]]

# Steps of each kind that are compared, the last ones.
COMPARED = 32


class DraftShare:
    """Log that adds `time/draft_training` to each step before `log` writes it.

    It compares the median time of the last steps that trained the draft with that of the last that did not. Steps that
    compile or time themselves are left out.

    log: writes metrics and returns the values written.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._seconds: dict[bool, deque[float]] = {kind: deque(maxlen=COMPARED) for kind in (True, False)}
        self._trained: deque[bool] = deque(maxlen=COMPARED)
        self._first = True

    def __call__(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float | None]:
        """Add the share to the metrics of a step, and log them."""
        if "draft/trained" not in metrics:
            return self._log(step, metrics)
        trained = bool(metrics["draft/trained"])
        self._trained.append(trained)
        if not self._first and "time/generation" not in metrics and "time/step" in metrics:
            self._seconds[trained].append(float(metrics["time/step"]))
        self._first = False
        return self._log(step, {**metrics, "time/draft_training": self._share()})

    def _share(self) -> float | None:
        """Return the share of the time of the last steps; None until both kinds of step have been timed."""
        if not all(self._seconds.values()):
            return None
        with_draft, without = (statistics.median(self._seconds[kind]) for kind in (True, False))
        extra = statistics.fmean(self._trained) * max(with_draft - without, 0.0)
        return extra / (without + extra)

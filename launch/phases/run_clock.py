"""Clock of a run: the seconds of its parts, which add up to the time since its start."""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from launch.phases.compile_clock import CompileClock

COMPILING, OTHER, TOTAL = "compiling", "other", "total"
# The part that a phase belongs to, by how its name begins. Another phase is a part of its own.
PARTS = {
    "loading": "loading",
    "check of": "loading",
    "answers": "distilling",
    "features": "distilling",
    "distillation": "distilling",
    "evaluation": "evaluating",
    "compiling of rounds": "measuring rounds",
    "costs of rounds": "measuring rounds",
    "first steps": "comparison",
    "timed steps": "comparison",
}

_clock: ContextVar["RunClock | None"] = ContextVar("clock", default=None)


class RunClock:
    """Clock that is in one part at a time: a part within another one pauses it.

    What the thread compiles, or waits for another thread to compile, is in no part but `COMPILING`.
    """

    def __init__(self) -> None:
        self._seconds, self._part, self._since = defaultdict[str, float](float), OTHER, time.perf_counter()
        self._compiling = CompileClock()

    def enter(self, part: str) -> str:
        """Begin a part, and return the one that it pauses or ends."""
        now = time.perf_counter()
        elapsed = now - self._since
        compiling = min(self._compiling.lap(), elapsed)
        self._seconds[COMPILING] += compiling
        self._seconds[self._part] += elapsed - compiling
        self._since, before, self._part = now, self._part, part
        return before

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part so far, the longest first, `OTHER` and their `TOTAL` last.

        They are rounded to tenths before they are added, so that the total is the sum of what is shown.
        """
        self.enter(self._part)
        rounded = {part: round(seconds, 1) for part, seconds in self._seconds.items()}
        parts = sorted(rounded.items(), key=lambda item: (item[0] == OTHER, -item[1]))
        return {part: seconds for part, seconds in parts if seconds} | {TOTAL: round(sum(rounded.values()), 1)}


@contextmanager
def timed_run() -> Iterator[None]:
    """Clock the parts of a run as long as the block runs."""
    token = _clock.set(RunClock())
    try:
        yield
    finally:
        _clock.reset(token)


@contextmanager
def run_part(phase: str) -> Iterator[None]:
    """Count the block as a part of the run that is clocked, if one is. phase: a part, or the name of a phase."""
    if (clock := _clock.get()) is None:
        yield
        return
    before = clock.enter(next((part for name, part in PARTS.items() if phase.startswith(name)), phase))
    try:
        yield
    finally:
        clock.enter(before)


def run_seconds() -> dict[str, float] | None:
    """Return `RunClock.seconds` of the run that is clocked; None if none is."""
    return None if (clock := _clock.get()) is None else clock.seconds()


def describe_seconds(seconds: Mapping[str, float]) -> str:
    """Return the seconds of the parts of a run as a line."""
    parts = ", ".join(f"{part} {value:.1f}" for part, value in seconds.items() if part != TOTAL)
    return f"time of the run: {seconds[TOTAL]:.1f} s = {parts}"

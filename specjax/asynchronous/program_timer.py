"""When the programs of a mesh begin and end, seen from a thread beside the one that dispatches them."""

import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax


class Span(NamedTuple):
    """A program on a mesh. idle_s: seconds between the one before it and this one; NaN for the first."""

    idle_s: float
    busy_s: float
    end: float


class ProgramTimer:
    """Times the programs of one mesh, which run one after another. Delays none of them."""

    def __init__(self) -> None:
        self._thread, self._last = ThreadPoolExecutor(1), Future[Span]()
        self._last.set_result(Span(math.nan, math.nan, math.nan))

    def time(self, since: float, needed: Any, made: Any) -> "Future[Span]":
        """Time a program that was dispatched after `since`, which is a time.perf_counter().

        needed: array that it waits for; None if all are there. made: one of its results. Neither may be donated.
        """
        self._last = self._thread.submit(self._span, self._last, since, needed, made)
        return self._last

    def idle_s(self) -> float:
        """Return for how many seconds the mesh has been idle: 0 while a program runs, NaN before the first."""
        return max(time.perf_counter() - self._last.result().end, 0.0) if self._last.done() else 0.0

    @staticmethod
    def _span(previous: "Future[Span]", since: float, needed: Any, made: Any) -> Span:
        before = previous.result().end
        begin = max(since, before) if before == before else since
        if not made.is_ready():
            # This thread is here since the program before has ended.
            jax.block_until_ready(needed)
            begin = time.perf_counter()
            jax.block_until_ready(made)
        end = time.perf_counter()
        return Span(begin - before, end - begin, end)

"""Progress of a long phase (n of N, tokens/s, time left) as one line, for a terminal or for a log."""

import threading
import time
from typing import Self

from rich.console import Console
from rich.status import Status

from launch.cli.console import console
from launch.cli.silence import note_progress

LOG_EVERY_S = 10.0


class Progress:
    """Progress of one phase. A terminal shows a line that changes; a log gets a line at most every LOG_EVERY_S.

    Args:
        name:  name of the phase, for example "distillation".
        total: number of units in the phase.
        unit:  name of the units, for example "steps".
        done:  number of units that are already finished.
        quiet: print nothing if the phase takes less than LOG_EVERY_S.
    """

    def __init__(
        self, name: str, total: int, unit: str, done: int = 0, console: Console = console, *, quiet: bool = False
    ) -> None:
        self.name, self.total, self.unit, self.done = name, total, unit, done
        self._console, self._quiet = console, quiet
        # Time, units and tokens after the first unit. The first one compiles, so its speed is not typical.
        self._measured: tuple[float, int, int] | None = None
        self._tokens, self._note = 0, ""
        self._status: Status | None = None
        self._printed = 0.0
        # Units done in the last line of a log.
        self._logged = -1
        self._late: threading.Timer | None = None

    def __enter__(self) -> Self:
        self._measured, self._note = None, ""
        if self._console.is_terminal:
            self._status = self._console.status("")
            self._status.start()
        if self._quiet:
            self._printed = time.perf_counter()
            # One unit may take longer than that.
            self._late = threading.Timer(LOG_EVERY_S, lambda: self._show(f"{self._line()} .."))
            self._late.daemon = True
            self._late.start()
        elif self.done < self.total:
            self._show(f"{self._line()}; compiling ..")
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self._status is not None:
            self._status.stop()
        short = self._late is not None and self._late.is_alive()
        if self._late is not None:
            self._late.cancel()
        if kind is None and not short and self._logged != self.done:
            self._console.print(self._line())

    def advance(self, units: int = 1, tokens: int = 0, note: str = "") -> None:
        """Count finished units and their tokens, generated or trained on. note: text at the end of the line."""
        self.done, self._tokens, self._note = self.done + units, self._tokens + tokens, note
        note_progress(f"{self.name}: {self.done} of {self.total} {self.unit}")
        now = time.perf_counter()
        if self._measured is None:
            self._measured = now, self.done, self._tokens
        if self._status is not None or now - self._printed >= LOG_EVERY_S:
            self._show(self._line())

    def _show(self, line: str) -> None:
        self._printed = time.perf_counter()
        if self._status is None:
            self._logged = self.done
            self._console.print(line)
        else:
            self._status.update(line)

    def _line(self) -> str:
        parts = [f"{self.name}: {self.done} of {self.total} {self.unit}"]
        if self._note:
            parts.append(self._note)
        if self._measured is not None:
            start, done, tokens = self._measured
            elapsed, units = time.perf_counter() - start, self.done - done
            if elapsed > 0 and self._tokens > tokens:
                parts.append(f"{(self._tokens - tokens) / elapsed:,.0f} tokens/s")
            if units and self.done < self.total:
                parts.append(f"{duration(elapsed / units * (self.total - self.done))} left")
        return ", ".join(parts)


def duration(seconds: float) -> str:
    """Return seconds as text, in h, min and s."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"

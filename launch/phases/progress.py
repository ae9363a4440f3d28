"""Progress of a long phase (n of N, tokens/s, time left) as one line, for a terminal, a notebook or a log."""

import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Self

from rich.console import Console
from rich.status import Status

from launch.console import NotebookLine, ProgressConsole, console
from launch.jobs.silence import note_progress
from launch.phases.run_clock import run_part

LOG_EVERY_S = 10.0
NOTEBOOK_EVERY_S = 1.0


class Progress:
    """Progress of one phase: a line that changes in a terminal or notebook, a line every LOG_EVERY_S in a log.

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
        # Programs that have run, and the end of the last unit since the phase was entered.
        self._programs, self._last_end = set[Hashable](), None
        # Of the units that count for the speed.
        self._seconds, self._units, self._tokens = 0.0, 0, 0
        self._note = ""
        self._status: Status | None = None
        # For lines that stay: a terminal gets one, at the end.
        self._print: Callable[[str], None] = NotebookLine().print if _in_notebook(console) else console.print
        self._every_s = NOTEBOOK_EVERY_S if _in_notebook(console) and not quiet else LOG_EVERY_S
        self._printed = 0.0
        # Units done in the last line that was printed.
        self._logged = -1
        self._late: threading.Timer | None = None
        self._part = ExitStack()

    def __enter__(self) -> Self:
        self._last_end, self._note = None, ""
        self._seconds, self._units, self._tokens = 0.0, 0, 0
        self._part.enter_context(run_part(self.name))
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
        self._part.close()
        if self._status is not None:
            self._status.stop()
        short = self._late is not None and self._late.is_alive()
        if self._late is not None:
            self._late.cancel()
        if kind is None and not short and self._logged != self.done:
            self._print(self._line())

    def advance(self, units: int = 1, tokens: int = 0, note: str = "", program: Hashable = None) -> None:
        """Count finished units and their tokens, generated or trained on.

        Speed and time left follow from runs of programs that ran before, so no compilation is in them.

        note:    text at the end of the line.
        program: what the units ran, if not every unit runs the same, as rows of another length do.
        """
        self.done, self._note = self.done + units, note
        note_progress(f"{self.name}: {self.done} of {self.total} {self.unit}")
        now = time.perf_counter()
        if self._last_end is not None and program in self._programs:
            self._seconds += now - self._last_end
            self._units, self._tokens = self._units + units, self._tokens + tokens
        self._programs.add(program)
        self._last_end = now
        if self._status is not None or now - self._printed >= self._every_s:
            self._show(self._line())

    def _show(self, line: str) -> None:
        self._printed = time.perf_counter()
        if self._status is None:
            self._logged = self.done
            self._print(line)
        else:
            self._status.update(line)

    def _line(self) -> str:
        parts = [f"{self.name}: {self.done} of {self.total} {self.unit}"]
        if self._note:
            parts.append(self._note)
        if self._units and self._seconds > 0:
            if self._tokens:
                parts.append(f"{self._tokens / self._seconds:,.0f} tokens/s")
            if self.done < self.total:
                parts.append(f"{duration(self._seconds / self._units * (self.total - self.done))} left")
        return ", ".join(parts)


@contextmanager
def showing_elapsed(name: str, every_s: float = 3 * LOG_EVERY_S, console: Console = console) -> Iterator[None]:
    """Print how long the block has taken so far, now and then, where nothing tells how much of it is done."""
    start, ended = time.perf_counter(), threading.Event()
    # Not counted as progress: a step that hangs is to be found.
    print_line = NotebookLine().print if _in_notebook(console) else partial(Console.print, console)

    def show() -> None:
        while not ended.wait(every_s):
            print_line(f"{name}: {duration(time.perf_counter() - start)} so far ..")

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _in_notebook(console: Console) -> bool:
    return isinstance(console, ProgressConsole) and console.in_notebook


def duration(seconds: float) -> str:
    """Return seconds as text, in h, min and s."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"

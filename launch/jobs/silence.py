"""A process that hangs ends its job, also where the others wait for it in a program of the devices."""

import os
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import jax

from launch.errors import one_line
from launch.jobs.failures import end_job
from specjax.parallel import processes

TOPIC = "progress"
# Looks at all processes within the limit.
_LOOKS = 10

# Files of Python itself; the frozen ones are within the interpreter. Packages may be installed among the others.
_PYTHON = (f"{sysconfig.get_path('stdlib')}{os.sep}", "<frozen ")
# Packages whose functions are named where a process hangs, beside files outside Python's directories.
_PACKAGES = {"launch", "configs", "models", "specjax"}

# The number of this process's notes, and the last one.
_latest = 0, "its start"
# What it waits for, the last begun at the end.
_awaited = list[str]()


def note_progress(done: str | None = None) -> None:
    """Note what this process has just done: a step, a part of a phase. None: something without a name."""
    global _latest
    number, last = _latest
    _latest = number + 1, done or last


@contextmanager
def waiting_for(name: str) -> Iterator[None]:
    """Name what this process waits for in the block, in the report of a process that hangs. Any thread may call it."""
    _awaited.append(name)
    try:
        yield
    finally:
        _awaited.remove(name)


def limit_silence(limit_s: int) -> None:
    """Start a thread that ends the job once no process has noted progress for so many seconds.

    They share steps and phases: those that wait for one that hangs soon have nothing to note either.
    """
    arguments = limit_s, processes.index(), threading.get_ident()
    threading.Thread(target=_watch, args=arguments, daemon=True, name="silence").start()


def _watch(limit_s: int, index: int, thread: int) -> None:
    """Tell where a thread of this process is. In process 0, end the job if nothing has changed for too long."""
    known, changed, places = 0, time.monotonic(), dict[str, list[str]]()
    while jax.distributed.is_initialized():
        time.sleep(limit_s / _LOOKS)
        # At a normal end JAX leaves the job meanwhile.
        with suppress(Exception):
            count, done = _latest
            place = f"after {done}, in {place_of(sys._current_frames()[thread])}"
            place += "".join(f", waiting for {name}" for name in _awaited[-1:])
            processes.tell(TOPIC, f"{count} {index} {place}")
            if index == 0:
                told = [message.split(" ", 2) for message in processes.read_messages(TOPIC)]
                if (total := sum(int(count) for count, *_ in told)) != known:
                    known, changed = total, time.monotonic()
                places.clear()
                for _, number, place in told:
                    places.setdefault(place, []).append(number)
        if index == 0 and time.monotonic() - changed > limit_s:
            # First the place where the fewest are.
            found = sorted(places.items(), key=lambda item: len(item[1]))
            found = "; ".join(f"process {', '.join(numbers)} {place}" for place, numbers in found)
            message = f"hosts.silence = {limit_s} s: no process has gone on for so long: {found}"
            print("error:", one_line(message), file=sys.stderr, flush=True)
            end_job(1, message, index)


def place_of(frame: FrameType) -> str:
    """Return the innermost place of a stack that is in this project, or in the user's files: not in a library."""
    own: FrameType | None = frame
    while own is not None and _is_library(own):
        own = own.f_back
    own = own or frame
    return f"{own.f_code.co_name} ({own.f_code.co_filename.rpartition('/')[2]}:{own.f_lineno})"


def _is_library(frame: FrameType) -> bool:
    package, file = str(frame.f_globals.get("__name__")).partition(".")[0], frame.f_code.co_filename
    return file.startswith(_PYTHON) or ("-packages/" in file and package not in _PACKAGES)

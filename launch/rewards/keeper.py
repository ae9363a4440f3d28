"""The keeper of a scorer process: its parent, which ends it together with all processes that it started.

A child may leave its process group, lose its parent, or clear its environment. On Linux the keeper finds it anyway: it
is the subreaper of its descendants, so orphans become its children. On other systems it ends the process group.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# Limit of the wait for killed processes: one that waits for a device cannot be killed.
PATIENCE_S = 1.0

# Options of prctl(2).
_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36


def keep(run: Callable[[], None], release: Callable[[], None]) -> None:
    """Call `run` in a forked process with its own group. Return after it and all processes that it started have ended.

    SIGTERM ends them early, and so does the death of this process's parent. This process must have one thread.

    release: called in this process to close what only the forked one should hold.
    """
    signal.signal(signal.SIGTERM, _exit_once)
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    _prctl(_SET_CHILD_SUBREAPER, 1)
    kept = os.fork()
    if kept == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # A scorer that hangs does not notice that its socket closed. The kernel ends it even if the keeper is killed.
        _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        os.setpgid(0, 0)
        run()
        return
    try:
        try:
            release()
            while os.wait()[0] != kept:  # wait also returns for orphans
                pass
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    finally:  # SIGTERM may arrive during the line above
        _end_all(kept)


def _exit_once(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(0)


def _end_all(kept: int) -> None:
    with suppress(OSError):
        os.killpg(kept, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_S
    with suppress(ChildProcessError):  # there are no more children
        while time.monotonic() < deadline:
            for child in _children():
                with suppress(OSError):
                    os.kill(child, signal.SIGKILL)
            # Children of the processes that ended have become this process's children.
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.005)


def _children() -> list[int]:
    """Return the process ids of this process's children on Linux; none elsewhere."""
    children = []
    for pid in filter(str.isdecimal, os.listdir("/proc") if sys.platform == "linux" else ()):
        with suppress(OSError):  # the process may have ended meanwhile
            if int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) == os.getpid():
                children.append(int(pid))
    return children


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)

"""The guard of a process that runs a user's code: ends that process and all that it started.

This module imports nothing heavy, because processes that must start fast import it.
"""

import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# Limit of the guard's wait for killed processes: one that waits for a device cannot be killed.
PATIENCE_S = 1.0
SIGNALS = signal.SIGTERM, signal.SIGCHLD
# Loaded once: forks of this process use it too. With the options of its prctl(2).
_LIBC = ctypes.CDLL(None)
_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36


def run_guarded(work: Callable[[socket.socket], None], descriptor: int) -> None:
    """Fork a process that calls `work` with a socket. Return there after it, and here once that process has ended.

    When it ends, or this process gets SIGTERM, or the launcher's thread that started this process does, all processes
    that it started are ended. They may leave its process group, lose their parents, or clear their environments. On
    Linux they are found anyway: this process is the subreaper of its descendants, so orphans become its children. On
    other systems the process group is ended.

    descriptor: of the socket.
    """
    end = socket.socket(fileno=descriptor)
    end.set_inheritable(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # a signal that is ignored would be lost while it is blocked
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    end_with_parent(signal.SIGTERM)
    adopt_orphans()
    working = os.fork()
    if working == 0:
        # User code that hangs does not notice that its socket closed. The kernel ends it even if the guard is killed.
        end_with_parent(signal.SIGKILL)
        os.setpgid(0, 0)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        work(end)
        return
    end.close()
    while signal.sigwait(SIGNALS) == signal.SIGCHLD and working not in ended_children():
        pass
    _end_all(working)


def end_with_parent(number: signal.Signals) -> None:
    """Let the kernel send this process a signal when the thread that started it ends. Only on Linux."""
    _prctl(_SET_PARENT_DEATH_SIGNAL, number)


def adopt_orphans() -> None:
    """Make orphans among this process's descendants its children. Only on Linux."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def ended_children() -> dict[int, int]:
    """Collect the children that have ended: {process id: status as os.waitpid returns it}."""
    ended = {}
    with suppress(ChildProcessError):  # there are no more children
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended[child[0]] = child[1]
    return ended


def children() -> list[int]:
    """Return the process ids of this process's children on Linux; none elsewhere."""
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc") if sys.platform == "linux" else ()):
        with suppress(OSError):  # the process may have ended meanwhile
            if int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(pid))
    return found


def kill(pid: int) -> None:
    """Kill a child, and its process group if it leads one."""
    for send in (os.killpg, os.kill):
        with suppress(OSError):
            send(pid, signal.SIGKILL)


def _end_all(group: int) -> None:
    kill(group)
    deadline = time.monotonic() + PATIENCE_S
    with suppress(ChildProcessError):  # there are no more children
        while time.monotonic() < deadline:
            for child in children():
                kill(child)
            # Children of the processes that ended have become this process's children.
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.005)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        _LIBC.prctl(option, value)

"""The program of a worker: `python -m launch.rewards.worker SCORERS FD`, started by `launch.rewards.workers`.

It is two processes. The first one, the guard, forks the second one, which runs the scorers. When that one ends, or
the guard gets SIGTERM, the guard ends every process that the scorers started.

SCORERS is JSON: [name, regular expression or null] for each scorer. FD is a socket to the pool, which carries JSON, one
message per line. The worker sends [process id, index] before it imports a scorer, [process id, null] after the last
one, or [process id, text] with the reason why it could not. The pool then sends requests [request number,
[[text, answer or null, problem], ..]]: a completion's text, the answer in it, and its problem as an object or only the
text of its answer. The worker answers with one message per sample: [request number, index, process id, result]. A
result is a list with each scorer's value, or text with the reason why there is none.

This module imports nothing heavy, so that a worker starts as fast as its scorers allow.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from launch.errors import ConfigError
from launch.rewards.answers import Completion
from launch.rewards.scorers import NotANumber, NoValue, Scorer, as_number, load_scorer, option_of

RECEIVED_BYTES = 2**20  # at a time
# Limit of the guard's wait for killed processes: one that waits for a device cannot be killed.
PATIENCE_S = 1.0
SIGNALS = signal.SIGTERM, signal.SIGCHLD
# Options of prctl(2).
_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36


def main(scorers: str, descriptor: str) -> None:
    """Fork the process that runs the scorers. Return after it and all processes that it started have ended.

    A child may leave its process group, lose its parent, or clear its environment. On Linux the guard finds it anyway:
    it is the subreaper of its descendants, so orphans become its children. On other systems it ends the process group.
    """
    end = socket.socket(fileno=int(descriptor))
    end.set_inheritable(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # a signal that is ignored would be lost while it is blocked
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    _prctl(_SET_CHILD_SUBREAPER, 1)
    scoring = os.fork()
    if scoring == 0:
        # A scorer that hangs does not notice that its socket closed. The kernel ends it even if the guard is killed.
        _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        os.setpgid(0, 0)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        serve(json.loads(scorers), end)
        return
    end.close()
    with suppress(ChildProcessError):  # there are no more children
        while signal.sigwait(SIGNALS) == signal.SIGCHLD and scoring not in _ended_children():
            pass
    _end_all(scoring)


def serve(scorers: Sequence[tuple[str, str | None]], end: socket.socket) -> None:
    """Import the scorers and answer the pool's requests until the pool closes its end."""
    # Child processes of a scorer must not hold the socket open or write to it.
    os.register_at_fork(after_in_child=end.close)
    this_process = os.getpid()

    def send(*message: object) -> None:
        end.sendall(json.dumps(message).encode() + b"\n")

    loaded, received = list[Scorer](), b""
    with suppress(ConnectionError):
        for index, (name, pattern) in enumerate(scorers):
            send(this_process, index)
            option = option_of(index)
            try:
                loaded.append(load_scorer(name, pattern, option))
            except BaseException as error:
                expected = isinstance(error, ConfigError)
                reason = str(error) if expected else f"{option} = {name}: {type(error).__name__}: {error}"
                return send(this_process, reason)
        send(this_process, None)
        while data := end.recv(RECEIVED_BYTES):
            *requests, received = (received + data).split(b"\n")
            for number, samples in map(json.loads, requests):
                for index, (text, answer, problem) in enumerate(samples):
                    result = _values(loaded, Completion(text, answer), problem)
                    if os.getpid() != this_process:  # a scorer forked, and its child returned here
                        os._exit(1)
                    send(number, index, this_process, result)


def _values(scorers: Sequence[Scorer], completion: Completion, problem: str | dict[str, Any]) -> list[float] | str:
    values = []
    for scorer in scorers:
        try:
            values.append(as_number(scorer(completion, problem)))
        except (NoValue, NotANumber) as error:
            return str(error)
        except BaseException as error:  # SystemExit and KeyboardInterrupt too
            return f"raised {type(error).__name__}: {error!s:.200}"
    return values


def _ended_children() -> list[int]:
    """Collect the children that have ended, and return their ids. Raises ChildProcessError if there are none left."""
    return list(iter(lambda: os.waitpid(-1, os.WNOHANG)[0], 0))


def _end_all(group: int) -> None:
    with suppress(OSError):
        os.killpg(group, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_S
    with suppress(ChildProcessError):
        while time.monotonic() < deadline:
            for child in _children():
                with suppress(OSError):
                    os.kill(child, signal.SIGKILL)
            # Children of the processes that ended have become this process's children.
            _ended_children()
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


if __name__ == "__main__":
    main(*sys.argv[1:])

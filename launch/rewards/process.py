"""One scorer process as the pool sees it: started, asked, killed with all its children, and replaced."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from launch.rewards.channel import LONGEST_MESSAGE, Channel

START_LIMIT_S = 120.0  # for importing the scorer
# Names the scorer process and everything that it starts, in their environment.
COOKIE = "SPECJAX_SCORER_PROCESS"

Sample = tuple[str, str]
# The value of each scorer, or why there are none.
Result = list[float] | str


class ScorerProcess:
    """A scorer process, replaced whenever it hangs, dies or says what it was not asked. One thread may use it.

    Args:
        scorers:      JSON, as launch.rewards.worker takes it.
        time_limit_s: Seconds for all scorers of a sample.
        closing:      Set when the pool closes: samples that are still waiting fail.
    """

    def __init__(self, scorers: str, time_limit_s: float, closing: threading.Event) -> None:
        self._scorers = scorers
        self._time_limit_s = time_limit_s
        self._closing = closing
        self._process: subprocess.Popen[bytes] | None = None
        self._request = 0

    def problem(self) -> str | None:
        """Start the process and return what keeps it from coming up, or None."""
        try:
            self._start()
        except OSError as error:
            return str(error)
        return None

    def score(self, samples: list[Sample]) -> list[Result]:
        """Return the values of each sample, or as text why it has none."""
        results: list[Result] = []
        while len(results) < len(samples):
            try:
                if self._process is None or self._process.poll() is not None:
                    self._start()
                self._request += 1
                rest = samples[len(results) :]
                self._channel.send([self._request, rest], self._time_limit_s)
                for index in range(len(rest)):
                    results.append(self._result(index))
            except OSError as error:
                self.discard()
                results.append(str(error))
        return results

    def kill(self) -> None:
        """Stop the process and its group; may be called from any thread."""
        process = self._process
        if process is not None and process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def discard(self) -> None:
        """Stop the process, if there is one, with all that it started, and wait for it."""
        if self._process is not None:
            self.kill()
            self._process.wait()
            self._process = None
            self._channel.close()
            _kill_all(self._cookie)

    def _start(self) -> None:
        self.discard()
        ours, theirs = socket.socketpair()
        self._channel, self._cookie = Channel(ours), uuid.uuid4().hex
        # What the launcher can import, a scorer process can.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with theirs:
            command = [sys.executable, "-P", "-m", "launch.rewards.worker", self._scorers, str(theirs.fileno())]
            # A session of its own: Ctrl-C is for the launcher alone, and a kill reaches what the scorer started.
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path, COOKIE: self._cookie},
                start_new_session=True,
            )
        problem = self._receive(START_LIMIT_S)
        if problem is not None:
            raise ChildProcessError(problem)

    def _result(self, index: int) -> Result:
        """Return the result of sample `index` of the present request. Raises ChildProcessError if another comes."""
        assert self._process is not None
        match self._receive(self._time_limit_s):
            case [request, number, pid, list() | str() as result] if [request, number, pid] == [
                self._request,
                index,
                self._process.pid,
            ]:
                return result
        raise ChildProcessError("mixed up: its process sent what is no result of this sample")

    def _receive(self, limit_s: float) -> Any:
        """Return the process's next message. Raises ChildProcessError if there is none."""
        if self._closing.is_set():
            raise ChildProcessError("stopped: the pool is closed")
        try:
            return self._channel.receive(limit_s, LONGEST_MESSAGE)
        except TimeoutError:
            raise ChildProcessError(f"hung: no value within {limit_s:g} s") from None
        except ValueError:
            raise ChildProcessError("mixed up: its process sent what is no message") from None
        except (EOFError, OSError):
            raise ChildProcessError("died: its process ended") from None


def _kill_all(cookie: str) -> None:
    """Kill every process whose environment holds the cookie: children that left the process group are found too.

    Only Linux has /proc. The search is repeated until it finds none, because a process may start another one before it
    dies; for a second at most, because one that waits for a device cannot die.
    """
    wanted = f"{COOKIE}={cookie}".encode()
    for _ in range(100):
        found = False
        for pid in filter(str.isdecimal, os.listdir("/proc") if sys.platform == "linux" else ()):
            with suppress(OSError):  # it has ended meanwhile, or is another user's
                if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    os.kill(int(pid), signal.SIGKILL)
                    found = True
        if not found:
            return
        time.sleep(0.01)

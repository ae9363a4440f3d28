"""Client of one scorer process: starts it, sends it samples, kills it with its children, replaces it."""

import os
import socket
import subprocess
import sys
import threading
from typing import Any

from launch.rewards.channel import LONGEST_MESSAGE, Channel

START_LIMIT_S = 120.0  # for importing the scorer
STOP_LIMIT_S = 5.0

Sample = tuple[str, str]
# The value of each scorer, or the reason why there are none.
Result = list[float] | str


class ScorerProcess:
    """A scorer process, which is replaced when it hangs, dies or sends an unexpected message. Not thread-safe.

    Args:
        scorers:      JSON, as launch.rewards.worker takes it.
        time_limit_s: Limit in seconds for all scorers of one sample together.
        closing:      Event that is set when the pool closes: samples that are still waiting then fail.
    """

    def __init__(self, scorers: str, time_limit_s: float, closing: threading.Event) -> None:
        self._scorers = scorers
        self._time_limit_s = time_limit_s
        self._closing = closing
        self._keeper: subprocess.Popen[bytes] | None = None
        self._pid = self._request = 0

    def problem(self) -> str | None:
        """Start the process. Return why it could not start, or None if it did."""
        try:
            self._start()
        except OSError as error:
            return str(error)
        return None

    def score(self, samples: list[Sample]) -> list[Result]:
        """Return the values of each sample, or the reason why it has none as text."""
        results: list[Result] = []
        while len(results) < len(samples):
            try:
                if self._keeper is None or self._channel.ended():
                    self._start()
                self._request += 1
                remaining = samples[len(results) :]
                self._channel.send([self._request, remaining], self._time_limit_s)
                for index in range(len(remaining)):
                    results.append(self._result(index))
            except OSError as error:
                self.discard()
                results.append(str(error))
        return results

    def kill(self) -> None:
        """Tell the keeper to stop the process and all that it started. Any thread may call it."""
        if (keeper := self._keeper) is not None:
            keeper.terminate()

    def discard(self) -> None:
        """Stop the process and all that it started, and wait for the end. Does nothing without a process."""
        if self._keeper is not None:
            self.kill()
            try:
                self._keeper.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:  # a scorer suspended the keeper
                self._keeper.kill()
                self._keeper.wait()
            self._keeper = None
            self._channel.close()

    def _start(self) -> None:
        self.discard()
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        # Scorer processes can import whatever the launcher can.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with theirs:
            command = [sys.executable, "-P", "-m", "launch.rewards.worker", self._scorers, str(theirs.fileno())]
            # In its own session, so that Ctrl-C reaches only the launcher.
            self._keeper = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )
        match self._receive(START_LIMIT_S):
            case [int() as pid, None]:
                self._pid = pid
                return
            case [int(), str() as problem]:
                raise ChildProcessError(problem)
        raise ChildProcessError("mixed up: its process sent an unexpected message when it started")

    def _result(self, index: int) -> Result:
        """Return the result of sample `index` of the current request. Raises ChildProcessError on any other message."""
        expected = [self._request, index, self._pid]
        match self._receive(self._time_limit_s):
            case [*head, list() | str() as result] if head == expected:
                return result
        raise ChildProcessError("mixed up: its process sent a message that is not the result of this sample")

    def _receive(self, limit_s: float) -> Any:
        """Return the process's next message. Raises ChildProcessError if there is none."""
        if self._closing.is_set():
            raise ChildProcessError("stopped: the pool is closed")
        try:
            return self._channel.receive(limit_s, LONGEST_MESSAGE)
        except TimeoutError:
            raise ChildProcessError(f"hung: no value within {limit_s:g} s") from None
        except ValueError:
            raise ChildProcessError("mixed up: its process sent a malformed message") from None
        except (EOFError, OSError):
            raise ChildProcessError("died: its process ended") from None

"""Processes that run a user's code, each with a guard, and the log of what they print."""

import itertools
import logging
import os
import socket
import subprocess
import sys
import threading

logger = logging.getLogger(__name__)

START_LIMIT_S = 120.0  # for importing the user's modules
STOP_LIMIT_S = 5.0
PRINTED_LINES, LONGEST_LINE = 10, 500  # of their output that is logged
_READ_BYTES = 2**20


def start_guard(module: str, argument: str, theirs: socket.socket, output: int) -> subprocess.Popen[bytes]:
    """Start the program `python -m module argument FD`, whose main function is `run_guarded` with that descriptor.

    On Linux it ends with the thread that calls this.

    theirs: the program's end of a socket, FD. output: descriptor for what it prints.
    """
    # It can import whatever this process can.
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return subprocess.Popen(
        [sys.executable, "-uPm", module, argument, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,  # so that Ctrl-C reaches only the launcher
    )


def end_guard(guard: subprocess.Popen[bytes]) -> None:
    """End the program and all processes that it started, and wait for the end."""
    guard.terminate()
    try:
        guard.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:  # a user's code suspended the guard
        guard.kill()
        guard.wait()


class PrintedLines:
    """Log of the first lines that a user's code prints. The others are dropped, so that none fills or blocks the log.

    label: of the code, for messages. `descriptor`: processes write to it.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        printed, self.descriptor = os.pipe()
        self._reader = threading.Thread(target=self._log, args=(printed,), daemon=True)
        self._reader.start()

    def close(self) -> None:
        """Log what was printed. The processes must have ended."""
        os.close(self.descriptor)
        self._reader.join(STOP_LIMIT_S)

    def _log(self, printed: int) -> None:
        with open(printed, "rb") as output:
            for line in itertools.islice(iter(lambda: output.readline(LONGEST_LINE), b""), PRINTED_LINES):
                logger.warning("%s: printed %r", self._label, line.decode(errors="replace").rstrip())
            if output.read(1):
                logger.warning("%s: prints more, which is not shown", self._label)
            while output.read(_READ_BYTES):
                pass

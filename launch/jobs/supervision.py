"""Supervisor of a program that is part of a job over several hosts. It restarts the program when a host dies.

When a process of a job dies, JAX ends all others from C++ with a stack trace, without running Python code. So a parent
process reports the cause and restarts the program.
"""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from launch.jobs.failures import LOST, LOST_PEER
from launch.jobs.hosts import HOSTS_LINE

# Printed by `failures.lose`, and by JAX's C++ code, when a process has lost another one. Later lines are only of this
# kind.
_LAST_LINES = re.compile(rf"{LOST}|F\d{{4}} |E\d{{4}} .*(?:coordination|heartbeat)", re.IGNORECASE)
# Lines with the numbers of lost processes.
_UNHEALTHY = re.compile(r"stopped sending heartbeats\):(.*?)(?:The tasks|\Z)", re.DOTALL)
_TIMEOUT = re.compile(r"Task (\d+) heartbeat timeout")
# Process 0, which names lost processes, is gone itself.
_NO_COORDINATOR = re.compile("Failed to send RPC to coordination service|Socket closed")
# Exit code of a process that JAX ends: as seen by its parent, or by a shell between them.
_ABORTED = (-signal.SIGABRT, LOST_PEER)


class Ended(NamedTuple):
    """End of a program: its return code, and the lines of stderr that were not shown yet."""

    code: int
    held: list[str]
    hosts: dict[int, str]


class Supervisor:
    """Runs a command, and restarts it until it ends by itself. Signals to this process are passed to the command.

    Args:
        command:  the program and its arguments, with `--out`.
        begun:    the file that a run which has begun has: the program is then started with `--resume`.
        restarts: largest number of restarts.
        pause_s:  seconds to wait before a restart, so that all other processes notice the loss too.
        say:      called with one line at each death.
    """

    def __init__(
        self, command: Sequence[str], begun: Path, restarts: int, pause_s: float, say: Callable[[str], None]
    ) -> None:
        self._command, self._begun, self._restarts, self._pause_s, self._say = command, begun, restarts, pause_s, say
        self._process: subprocess.Popen[str] | None = None
        self._stopped: int | None = None

    def supervise(self) -> int:
        """Return the exit code of the last start."""
        handlers = {number: signal.signal(number, self._pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            for restarts_left in range(self._restarts, -1, -1):
                result = self._start()
                cause = cause_of(result)
                code = 128 - result.code if result.code < 0 else result.code
                if cause is None or self._stopped is not None:
                    return code
                then = f"starting again in {self._pause_s:.0f} s, {restarts_left} left" if restarts_left else "ending"
                self._say(f"{cause}; {then}")
                if not restarts_left or not self._wait():
                    return code
            raise AssertionError
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _start(self) -> Ended:
        resume = ["--resume"] if self._begun.exists() and "--resume" not in self._command else []
        last_lines, hosts, ending = list[str](), dict[int, str](), False
        # In its own session, so that a signal to this process's group does not reach it twice.
        with subprocess.Popen(
            [*self._command, *resume], stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
        ) as self._process:
            if self._stopped is not None:  # a signal that came while there was no program to pass it to
                self._process.send_signal(self._stopped)
            assert self._process.stderr is not None
            for line in self._process.stderr:
                ending |= _LAST_LINES.match(line) is not None
                if line.startswith(HOSTS_LINE):
                    hosts = {int(number): name for number, name in re.findall(r"(\d+) = ([^,]+)", line.strip())}
                if ending:
                    last_lines.append(line)
                else:
                    sys.stderr.write(line)
                    sys.stderr.flush()
        result = Ended(self._process.returncode, last_lines, hosts)
        if last_lines and not _lost_peer(result):
            sys.stderr.writelines(last_lines)
        return result

    def _pass_on(self, number: int, frame: object) -> None:
        self._stopped = number
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def _wait(self) -> bool:
        """Wait before a restart. Return False if a signal arrived."""
        deadline = time.monotonic() + self._pause_s
        while self._stopped is None and time.monotonic() < deadline:
            time.sleep(0.1)
        return self._stopped is None


def cause_of(result: Ended) -> str | None:
    """Return one line with the reason for a restart; None if the program ended by itself."""
    if _lost_peer(result):
        text = "".join(result.held)
        numbers = [*_TIMEOUT.findall(text), *re.findall(r"(\d+)(?=[,\s]|$)", " ".join(_UNHEALTHY.findall(text)))]
        tasks = sorted(set(map(int, numbers)))
        if not tasks and _NO_COORDINATOR.search(text):
            tasks = [0]
        dead = [f"process {task} on {result.hosts.get(task, 'an unknown host')}" for task in tasks]
        return f"{', '.join(dead) or 'another process'} died, and JAX ended this one"
    if result.code < 0:
        name = signal.Signals(-result.code).name
        memory = ", perhaps for lack of memory" if name == "SIGKILL" else ""
        return f"{name} ended the program on this host{memory}"
    return None


def _lost_peer(result: Ended) -> bool:
    return result.code == LOST_PEER or (result.code in _ABORTED and any("distributed" in line for line in result.held))

"""Check that all processes of a job are there before JAX connects them. If one is missing, JAX aborts all of them."""

import contextlib
import json
import socket
import time

from configs.schema import HostsConfig
from launch.errors import RunStopped, one_line
from specjax.parallel.listener import ANSWER_WITHIN_S, Listener, NotAdmittedError, call, read_line

# Processes have no secret before they meet. JAX's coordinator, which takes the port after this, asks for none either.
_NO_KEY = b""
_RETRY_S = _POLL_S = 0.5
# Of a reason that others give.
_LETTERS = 400
# Once a job cannot start, process 0 answers late callers, and a failed process calls process 0, for this long.
_FAILED_WITHIN_S = 10.0
# An ending run leaves the port within this time.
_TAKEN_WITHIN_S = 60.0


def wait_for_all(hosts: HostsConfig, within_s: float) -> None:
    """Wait until every process has called process 0 on the coordinator's port, and all are there at the same time.

    Raises RunStopped, in every process that can be reached, if a process is missing after `within_s` or has failed, if
    two have the same index, or if their counts differ.
    """
    if refusal := _meet(hosts, within_s):
        raise RunStopped(f"hosts.coordinator = {hosts.coordinator}: {one_line(refusal, _LETTERS)}")


def tell_failure(hosts: HostsConfig, message: str) -> None:
    """Tell the processes of a job that has not begun that this one has failed. Those that start much later wait."""
    _meet(hosts, _FAILED_WITHIN_S, message)


def _meet(hosts: HostsConfig, within_s: float, failure: str = "") -> str:
    """Return the reason why the job cannot start, "" if it can. failure: that of this process, "" if it can start."""
    assert hosts.coordinator is not None
    host, _, port = hosts.coordinator.rpartition(":")
    if hosts.index:
        return _call(host.strip("[]"), int(port), hosts, within_s, failure)
    try:
        listener = Listener(int(port), _NO_KEY, expected=hosts.count)
    except OSError as error:
        return f"process 0 cannot open the port: {error.strerror}"
    with listener:
        return _Meeting(hosts.count, within_s, failure).hold(listener)


class _Meeting:
    """The callers of process 0. They wait until all are there, or it is known that the job cannot start.

    count:    number of processes, with process 0.
    within_s: time for all to come. Once the job cannot start, others are told for at most `_FAILED_WITHIN_S`.
    failure:  why process 0 cannot start; "" if it can.
    """

    def __init__(self, count: int, within_s: float, failure: str) -> None:
        self._count, self._within_s, self._deadline = count, within_s, time.monotonic() + within_s
        self._refusal = failure and f"process 0 failed: {failure}"
        self._waiting, self._told = dict[int, socket.socket](), set[int]()
        # Largest count that any process has.
        self._most = count

    def hold(self, listener: Listener) -> str:
        """Return the reason why the job cannot start, "" if it can, and tell it to every caller."""
        while missing := self._missing():
            if (left_s := self._deadline - time.monotonic()) <= 0:
                self._refusal = self._refusal or f"process {missing} is missing after {self._within_s:.0f} s"
                break
            calls = listener.accept(min(left_s, _POLL_S))
            # One that has given up is not there, and may come again.
            for index in [index for index, caller in self._waiting.items() if _hung_up(caller)]:
                self._waiting.pop(index).close()
            for connection, message in calls:
                self._receive(connection, message)
            if self._refusal:
                self._answer()
        self._answer()
        return self._refusal

    def _missing(self) -> int | None:
        """Return the first process that has not come, None if all are there."""
        return next((i for i in range(1, self._most) if i not in self._waiting and i not in self._told), None)

    def _receive(self, connection: socket.socket, message: object) -> None:
        """Keep a caller, or answer it at once if the job cannot start with it. Hang up on strangers."""
        match message:
            case [int(index), int(count), str(failure)] if 0 < index < count:
                fault = ""
                if failure:
                    fault = f"process {index} failed: {failure}"
                elif count != self._count:
                    fault = f"process {index} has hosts.count = {count}, and process 0 has {self._count}"
                    self._most = max(self._most, count)
                elif index in self._waiting:
                    fault = f"two processes have hosts.index = {index}"
                if fault and not self._refusal:
                    self._refusal = one_line(fault, _LETTERS)
                    self._deadline = min(self._deadline, time.monotonic() + _FAILED_WITHIN_S)
                if fault:
                    _send(connection, self._refusal)
                    self._told.add(index)
                else:
                    self._waiting[index] = connection
            case _:
                connection.close()

    def _answer(self) -> None:
        for connection in self._waiting.values():
            _send(connection, self._refusal)
        self._told |= self._waiting.keys()
        self._waiting.clear()


def _send(connection: socket.socket, refusal: str) -> None:
    with connection, contextlib.suppress(OSError):
        connection.settimeout(ANSWER_WITHIN_S)
        connection.sendall(json.dumps(refusal).encode() + b"\n")


def _hung_up(caller: socket.socket) -> bool:
    caller.settimeout(0)
    try:
        return not caller.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _call(host: str, port: int, hosts: HostsConfig, within_s: float, failure: str) -> str:
    """Return the answer of process 0, or the reason why there is none. failure: that of this process."""
    deadline, reason, taken_since = time.monotonic() + within_s, "", None
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            message = [hosts.index, hosts.count, failure]
            with call(host, port, _NO_KEY, message, time.monotonic() + min(left_s, ANSWER_WITHIN_S)) as connection:
                # Process 0 answers within as long as it may wait for the other processes.
                return str(json.loads(read_line(connection, time.monotonic() + within_s + ANSWER_WITHIN_S)))
        except NotAdmittedError:
            reason = "another program, or an ending run, has the port"
            taken_since = taken_since or time.monotonic()
            if time.monotonic() - taken_since > _TAKEN_WITHIN_S:
                return f"another program, or a job that has begun without hosts.index = {hosts.index}, has the port"
        except (OSError, ValueError, RecursionError) as error:
            reason, taken_since = getattr(error, "strerror", None) or str(error), None
        time.sleep(min(_RETRY_S, left_s))
    return f"process 0 is missing after {within_s:.0f} s: {reason}"

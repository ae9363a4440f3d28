"""Check that all processes of a job are there before JAX connects them. If one is missing, JAX aborts all of them."""

import contextlib
import json
import select
import socket
import time
from typing import Any

from configs.schema import HostsConfig
from launch.cli.errors import RunStopped

# A process of the job sends its line within this time after it connects. Other callers are ignored.
_CALL_WITHIN_S = 5.0
_RETRY_S = 0.5
# Of a line. A failure's letters may take 12 bytes each.
_MOST_BYTES = 5000
# Once a job cannot start, process 0 answers late callers, and a failed process calls process 0, for this long.
_FAILED_WITHIN_S = 10.0
# An ending run leaves the port within this time.
_TAKEN_WITHIN_S = 60.0


def wait_for_all(hosts: HostsConfig, within_s: float) -> None:
    """Wait until every process has called process 0 on the coordinator's port.

    Raises RunStopped, in every process that can be reached, if a process is missing after `within_s` or has failed, if
    two have the same index, or if their counts differ.
    """
    if refusal := _meet(hosts, within_s):
        raise RunStopped(f"hosts.coordinator = {hosts.coordinator}: {refusal}")


def tell_failure(hosts: HostsConfig, message: str) -> None:
    """Tell the processes of a job that has not begun that this one has failed. Those that start much later wait."""
    _meet(hosts, _FAILED_WITHIN_S, message)


def _meet(hosts: HostsConfig, within_s: float, failure: str = "") -> str:
    """Return the reason why the job cannot start, "" if it can. failure: that of this process, "" if it can start."""
    assert hosts.coordinator is not None
    host, _, port = hosts.coordinator.rpartition(":")
    if hosts.index == 0:
        return _answer(int(port), hosts.count, within_s, failure and f"process 0 failed: {failure}")
    return _call((host.strip("[]"), int(port)), hosts, within_s, failure)


def _answer(port: int, count: int, within_s: float, failure: str) -> str:
    """Answer each call with the reason why the job cannot start, or "" if it can, and return it.

    Callers wait until all have called, or the reason is known. Later ones are then told within `_FAILED_WITHIN_S`.

    failure: why this process cannot start; "" if it can.
    """
    deadline, callers = time.monotonic() + within_s, dict[int, socket.socket]()
    dual = socket.has_dualstack_ipv6()
    with contextlib.ExitStack() as stack:
        try:
            family = socket.AF_INET6 if dual else socket.AF_INET
            server = stack.enter_context(socket.create_server(("", port), family=family, dualstack_ipv6=dual))
        except OSError as error:
            return f"process 0 cannot open the port: {error.strerror}"
        waiting, refusal, most = list[socket.socket](), failure, count
        while missing := next((index for index in range(1, most) if index not in callers), 0):
            server.settimeout(max(deadline - time.monotonic(), 1e-3))
            try:
                caller = stack.enter_context(server.accept()[0])
            except TimeoutError:
                refusal = refusal or f"process {missing} is missing after {within_s:.0f} s"
                break
            waiting.append(caller)
            match _receive(caller, _CALL_WITHIN_S):
                case [int(index), int(its_count), str(its_failure)] if 0 < index < its_count:
                    fault = ""
                    if its_failure:
                        fault = f"process {index} failed: {its_failure}"
                    elif its_count != count:
                        fault = f"process {index} has hosts.count = {its_count}, and process 0 has {count}"
                        most = max(most, its_count)
                    elif index in callers and not _hung_up(callers[index]):
                        fault = f"two processes have hosts.index = {index}"
                    callers[index] = caller
                    if fault and not refusal:
                        refusal, deadline = fault, min(deadline, time.monotonic() + _FAILED_WITHIN_S)
            if refusal:
                _send(waiting, refusal)
                waiting.clear()
        _send(waiting, refusal)
    return refusal


def _send(connections: list[socket.socket], refusal: str) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.sendall(_line(refusal))


def _call(address: tuple[str, int], hosts: HostsConfig, within_s: float, failure: str) -> str:
    """Return the answer of process 0, or the reason why there is none. failure: that of this process."""
    deadline, reason, taken_since = time.monotonic() + within_s, "", None
    while (remaining_s := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(address, timeout=remaining_s) as connection:
                connection.sendall(_line([hosts.index, hosts.count, failure]))
                # As long as process 0 may wait for the other processes.
                answer = _receive(connection, within_s + _CALL_WITHIN_S)
            if isinstance(answer, str):
                return answer
            reason = "another program, or an ending run, has the port"
            taken_since = taken_since or time.monotonic()
            if time.monotonic() - taken_since > _TAKEN_WITHIN_S:
                return f"another program, or a job that has begun without hosts.index = {hosts.index}, has the port"
        except OSError as error:
            reason, taken_since = error.strerror or str(error), None
        time.sleep(min(_RETRY_S, remaining_s))
    return f"process 0 is missing after {within_s:.0f} s: {reason}"


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _receive(connection: socket.socket, within_s: float) -> Any:
    """Return the line of JSON that the other side sends; None if it sends anything else or nothing."""
    connection.settimeout(within_s)
    try:
        with connection.makefile("rb") as lines:
            return json.loads(lines.readline(_MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None


def _hung_up(caller: socket.socket) -> bool:
    return bool(select.select([caller], [], [], 0)[0])

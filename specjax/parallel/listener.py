"""TCP ports that strangers may call: few descriptors, deadlines of a whole exchange, no use for recorded bytes.

The listener sends a random challenge. The caller answers with a line: its message, and a code (HMAC) of challenge and
message. The listener's code of that line proves that it has the key too. What follows is neither signed nor encrypted.

Not ZeroMQ: libzmq 4.3.5, also with CURVE, accepts connections until the process has no descriptor left, and then tries
again in a busy loop.
"""

import hmac
import json
import secrets
import selectors
import socket
import time
from contextlib import suppress
from typing import Any

# A caller answers the challenge within this time, and an address accepts a connection.
ANSWER_WITHIN_S = 5.0
# Callers that are heard at a time, besides those that are expected.
_STRANGERS = 4
# Before the next try to accept, after one that failed for lack of descriptors.
_PAUSE_S = 0.1
# A transfer in which nothing moves for this time has stalled.
_STALLED_S = 60.0
_CHALLENGE_BYTES, _CODE_BYTES = 32, 64
_LINE_BYTES = 5000


class NotAdmittedError(ConnectionError):
    """Raised if no listener with the key answers at a port: it is another program's, or too many call. Try again."""


class Listener:
    """A port of this process on all interfaces. Callers without the key get no more than a challenge.

    One that has not proved itself makes room for a newer one, so that few descriptors serve any number of strangers.

    Args:
        port:     0: the system chooses one.
        key:      secret of both sides.
        expected: number of callers that have the key, and may come at the same time.
    """

    def __init__(self, port: int, key: bytes, expected: int) -> None:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._server = socket.create_server(("", port), family=family, dualstack_ipv6=dual)
        self._server.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._key, self._most = key, expected + _STRANGERS
        # Challenge, deadline and answer so far of callers that have not proved themselves. The oldest is the first.
        self._unproved = dict[socket.socket, tuple[bytes, float, bytearray]]()
        self.port: int = self._server.getsockname()[1]

    def accept(self, timeout_s: float) -> list[tuple[socket.socket, Any]]:
        """Return the connections that have proved themselves meanwhile, with their messages.

        Waits until a caller does anything, at most `timeout_s`. Drops callers that are late: to be called in a loop.
        """
        admitted = list[tuple[socket.socket, Any]]()
        for ready, _ in self._selector.select(timeout_s):
            if ready.fileobj is self._server:
                self._greet()
            elif ready.fileobj in self._unproved:  # a newer caller may have pushed it out meanwhile
                connection = ready.fileobj
                assert isinstance(connection, socket.socket)
                if message := self._hear(connection):
                    admitted.append((connection, *message))
        for connection, (_, deadline, _) in [*self._unproved.items()]:
            if time.monotonic() > deadline:
                self._forget(connection).close()
        return admitted

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, *exception: object) -> None:
        for connection in (*self._unproved, self._server):
            connection.close()
        self._selector.close()

    def _greet(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError:
            return time.sleep(_PAUSE_S)
        connection.setblocking(False)
        challenge = secrets.token_bytes(_CHALLENGE_BYTES)
        with suppress(OSError):  # noticed at the next read
            connection.send(challenge)
        self._unproved[connection] = challenge, time.monotonic() + ANSWER_WITHIN_S, bytearray()
        self._selector.register(connection, selectors.EVENT_READ)
        if len(self._unproved) > self._most:
            self._forget(next(iter(self._unproved))).close()

    def _hear(self, connection: socket.socket) -> tuple[Any] | None:
        """Return the message of a caller whose line has come, and keep its connection open. Drop one that cannot be."""
        challenge, _, line = self._unproved[connection]
        with suppress(OSError, ValueError, TypeError, RecursionError):
            part = connection.recv(_LINE_BYTES)
            line += part
            if part and len(line) < _LINE_BYTES and b"\n" not in line:
                return None
            code, _, text = line.partition(b" ")
            if hmac.compare_digest(code, _code(self._key, challenge + text)):
                _, message = json.loads(text)
                connection.send(_code(self._key, line))
                self._forget(connection)
                connection.setblocking(True)
                return (message,)
        self._forget(connection).close()
        return None

    def _forget(self, connection: socket.socket) -> socket.socket:
        self._selector.unregister(connection)
        del self._unproved[connection]
        return connection


def call(host: str, port: int, key: bytes, message: Any, deadline: float) -> socket.socket:
    """Return a connection to a listener that has the key, and has got the message, which is plain JSON.

    Raises NotAdmittedError if the answer is not a listener's or is not complete at the deadline, OSError if there is no
    connection.
    """
    connection = _connect(host, port, deadline)
    try:
        challenge = read(connection, _CHALLENGE_BYTES, deadline)
        # The random part makes each exchange another one, so that a stranger cannot repeat the listener's code.
        text = json.dumps([secrets.token_hex(_CHALLENGE_BYTES), message]).encode() + b"\n"
        line = _code(key, challenge + text) + b" " + text
        connection.sendall(line)
        if hmac.compare_digest(read(connection, _CODE_BYTES, deadline), _code(key, line)):
            return connection
        error = None
    except OSError as raised:
        error = raised
    connection.close()
    raise NotAdmittedError("another program has the port, or too many call it") from error


def read(connection: socket.socket, size: int, deadline: float) -> bytearray:
    """Return so many bytes. Raises TimeoutError at a deadline, a time of `time.monotonic`, or if the sender stalls."""
    found = bytearray(size)
    rest = memoryview(found)
    while rest:
        connection.settimeout(min(_left(deadline), _STALLED_S))
        count = connection.recv_into(rest)
        if not count:
            raise ConnectionError("it ended")
        rest = rest[count:]
    return found


def send(connection: socket.socket, message: bytes, deadline: float) -> None:
    """Send all bytes. Raises TimeoutError at a deadline, a time of `time.monotonic`, or if the reader stalls."""
    rest = memoryview(message)
    while rest:
        connection.settimeout(min(_left(deadline), _STALLED_S))
        rest = rest[connection.send(rest) :]


def read_line(connection: socket.socket, deadline: float) -> bytes:
    """Return a line. Raises ValueError if it is too long, TimeoutError if it has not come at the deadline."""
    line = b""
    while not line.endswith(b"\n"):
        connection.settimeout(_left(deadline))
        part = connection.recv(_LINE_BYTES)
        if not part:
            raise ConnectionError("it ended")
        line += part
        if len(line) > _LINE_BYTES:
            raise ValueError("the line is too long")
    return line


def _connect(host: str, port: int, deadline: float) -> socket.socket:
    refusal = OSError("it has no address")
    for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            return socket.create_connection((str(address[0]), port), min(_left(deadline), ANSWER_WITHIN_S))
        except OSError as error:
            refusal = error
    raise refusal


def _left(deadline: float) -> float:
    if (left_s := deadline - time.monotonic()) <= 0:
        raise TimeoutError("timed out")
    return left_s


def _code(key: bytes, text: bytes | bytearray) -> bytes:
    return hmac.new(key, text, "sha256").hexdigest().encode()

"""Messages between the pool and its scorer processes: JSON, one message per line, over a socket.

A scorer shares its process with this channel, so it may write to it, fork, or die halfway through a line. The pool
therefore trusts nothing it receives: messages are JSON, never pickle, and it limits both waits and line lengths.
"""

import json
import socket
import time
from typing import Any

LONGEST_MESSAGE = 2**20  # bytes; a message holds one value per scorer, or a short text
CHUNK = 2**16


class Channel:
    """One end of the socket. One thread at a time may use it."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._received = bytearray()

    def send(self, message: object, limit_s: float | None = None) -> None:
        """Send a message. Raises TypeError if it is not JSON, and OSError if the other end does not take it in time."""
        line = json.dumps(message).encode() + b"\n"
        self._socket.settimeout(limit_s)
        self._socket.sendall(line)

    def receive(self, limit_s: float | None = None, longest: int | None = None) -> Any:
        """Return the next message.

        Raises TimeoutError after `limit_s` seconds, EOFError if the other end is closed, and ValueError if a line is
        not JSON or has more than `longest` bytes.
        """
        deadline = None if limit_s is None else time.monotonic() + limit_s
        searched = 0
        while (end := self._received.find(b"\n", searched)) < 0:
            if longest is not None and len(self._received) > longest:
                raise ValueError(f"a message of more than {longest} bytes")
            searched = len(self._received)
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                raise TimeoutError
            self._socket.settimeout(remaining)
            data = self._socket.recv(CHUNK)
            if not data:
                raise EOFError
            self._received += data
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        try:
            return json.loads(line)
        except RecursionError:
            raise ValueError("a message nested too deep") from None

    def ended(self) -> bool:
        """Return True if the other end is closed and everything it sent has been received."""
        self._socket.settimeout(0)
        try:
            return not self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

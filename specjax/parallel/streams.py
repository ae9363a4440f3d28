"""Large messages between the processes of a job over TCP. Its key-value store is slower, and refuses 2 GiB."""

import ipaddress
import secrets
import socket
import time
from contextlib import suppress
from threading import Thread

from specjax.parallel.listener import ANSWER_WITHIN_S, Listener, NotAdmittedError, call, read, send

# A transfer ends after this time, and a second more for so many bytes.
_WITHIN_S, _BYTES_PER_S = 60.0, 2**20
_POLL_S = 0.1
_KEY_BYTES = 32


def offer(message: bytes, readers: int, coordinator: str) -> tuple[str, Thread]:
    """Offer a message on a port of its own. Return the address for `receive`, and a thread that ends when all have it.

    The address has a key, so that no one else is given the message.

    readers:     number of processes that will read it.
    coordinator: HOST:PORT of the job's coordinator, which all processes reach.
    """
    key = secrets.token_bytes(_KEY_BYTES)
    listener = Listener(0, key, expected=readers)
    thread = Thread(target=_serve, args=(listener, message, readers), daemon=True)
    thread.start()
    return f"{_reachable_host(coordinator)}@{listener.port}@{len(message)}@{key.hex()}", thread


def receive(address: str, reader: int) -> bytearray:
    """Return the message offered at an address. Raises ConnectionError if its process ends before.

    reader: number of this process. One that comes again is counted once.
    """
    try:
        host, port, size, key = address.split("@")
        deadline = _deadline(int(size))
        with _connect(host, int(port), bytes.fromhex(key), reader, deadline) as connection:
            return read(connection, int(size), deadline)
    except (OSError, ValueError, OverflowError, MemoryError) as error:
        sender = f"the process at {address.partition('@')[0]:.99}"
        raise ConnectionError(f"connection closed by {sender}, which was sending: {error}") from error


def _reachable_host(coordinator: str) -> str:
    """Return the address by which others reach this host: of the interface on the route to the coordinator.

    On the coordinator's own host that may be a loopback, and then it is the coordinator's name.
    """
    host, _, port = coordinator.rpartition(":")
    host = host.strip("[]")
    for family, *_, address in socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            found = probe.getsockname()[0]
            return host if ipaddress.ip_address(found).is_loopback else found
    return host


def _serve(listener: Listener, message: bytes, readers: int) -> None:
    served = set[int]()
    with listener:
        while len(served) < readers:
            for connection, reader in listener.accept(_POLL_S):
                Thread(target=_send, args=(connection, message, reader, served), daemon=True).start()


def _send(connection: socket.socket, message: bytes, reader: int, served: set[int]) -> None:
    with connection, suppress(OSError):
        send(connection, message, _deadline(len(message)))
        served.add(reader)


def _connect(host: str, port: int, key: bytes, reader: int, deadline: float) -> socket.socket:
    while True:
        with suppress(NotAdmittedError):
            return call(host, port, key, reader, min(deadline, time.monotonic() + ANSWER_WITHIN_S))
        time.sleep(_POLL_S)


def _deadline(size: int) -> float:
    return time.monotonic() + _WITHIN_S + size / _BYTES_PER_S

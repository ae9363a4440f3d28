"""Large messages between the processes of a job over TCP. Its key-value store is slower, and refuses 2 GiB."""

import hmac
import ipaddress
import secrets
import socket
from contextlib import suppress
from threading import Semaphore, Thread

# A process that has the address connects within this time. A transfer ends if nothing passes for as long.
_WITHIN_S = 60.0
# Strangers, who know no secret, are not waited for longer.
_SECRET_WITHIN_S = 5.0
_SECRET_BYTES = 16
_CHUNK_BYTES = 2**20


def offer(message: bytes, readers: int, coordinator: str) -> tuple[str, Thread]:
    """Offer a message on a port of its own. Return the address for `receive`, and a thread that ends when all have it.

    The address has a secret, so that no one else is given the message.

    readers:     number of processes that will read it.
    coordinator: HOST:PORT of the job's coordinator, which all processes reach.
    """
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    server = socket.create_server(("", 0), family=family, dualstack_ipv6=dual)
    secret = secrets.token_bytes(_SECRET_BYTES)
    thread = Thread(target=_serve, args=(server, secret, message, readers), daemon=True)
    thread.start()
    return f"{secret.hex()}@{_reachable_host(coordinator)}@{server.getsockname()[1]}", thread


def receive(address: str) -> bytearray:
    """Return the message offered at an address. Raises ConnectionError if its process ends before."""
    secret, host, port = address.split("@")
    try:
        with socket.create_connection((host, int(port)), _WITHIN_S) as connection:
            connection.sendall(bytes.fromhex(secret))
            return _read(connection, int.from_bytes(_read(connection, 8)))
    except OSError as error:
        raise ConnectionError(f"connection closed by the process at {host}, which was sending: {error}") from error


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


def _serve(server: socket.socket, secret: bytes, message: bytes, readers: int) -> None:
    left, served = readers, Semaphore(0)
    with server:
        server.settimeout(0.1)
        while left:
            with suppress(OSError):
                connection, _ = server.accept()
                Thread(target=_answer, args=(connection, secret, message, served), daemon=True).start()
            while served.acquire(blocking=False):
                left -= 1


def _answer(connection: socket.socket, secret: bytes, message: bytes, served: Semaphore) -> None:
    with connection, suppress(OSError):
        connection.settimeout(_SECRET_WITHIN_S)
        if not hmac.compare_digest(_read(connection, _SECRET_BYTES), secret):
            return
        connection.settimeout(_WITHIN_S)
        connection.sendall(len(message).to_bytes(8))
        rest = memoryview(message)
        while rest:
            rest = rest[connection.send(rest[:_CHUNK_BYTES]) :]
        served.release()


def _read(connection: socket.socket, size: int) -> bytearray:
    read = bytearray(size)
    rest = memoryview(read)
    while rest:
        count = connection.recv_into(rest)
        if not count:
            raise ConnectionError("it ended")
        rest = rest[count:]
    return read

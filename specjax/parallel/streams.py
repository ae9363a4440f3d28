"""Large messages between the processes of a job over TCP. Its key-value store is slower, and refuses 2 GiB."""

import hmac
import secrets
import socket
from contextlib import suppress
from threading import Thread

# A process that has the address connects, and then reads, within this time.
_WITHIN_S = 60.0
_SECRET_BYTES = 16


def offer(message: bytes, readers: int, towards: str) -> tuple[str, Thread]:
    """Offer a message on a port of its own. Return the address for `receive`, and a thread that ends when all have it.

    The address has a secret, so that no one else is given the message.

    readers: number of processes that will read it.
    towards: HOST:PORT that they reach this process by the way to, such as the job's coordinator.
    """
    host, _, port = towards.rpartition(":")
    family, *_, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as way:
        way.connect(address)  # sends nothing
        own = way.getsockname()[0]
    server, secret = socket.create_server((own, 0), family=family), secrets.token_bytes(_SECRET_BYTES)
    thread = Thread(target=_serve, args=(server, secret, message, readers), daemon=True)
    thread.start()
    return f"{secret.hex()}@{own}@{server.getsockname()[1]}", thread


def receive(address: str) -> bytearray:
    """Return the message offered at an address. Raises ConnectionError if its process ends before."""
    secret, host, port = address.split("@")
    try:
        with socket.create_connection((host, int(port)), _WITHIN_S) as connection:
            connection.sendall(bytes.fromhex(secret))
            return _read(connection, int.from_bytes(_read(connection, 8)))
    except OSError as error:
        raise ConnectionError(f"connection closed by the process at {host}, which was sending: {error}") from error


def _serve(server: socket.socket, secret: bytes, message: bytes, readers: int) -> None:
    with server:
        while readers:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                connection.settimeout(_WITHIN_S)
                if hmac.compare_digest(_read(connection, _SECRET_BYTES), secret):
                    connection.sendall(len(message).to_bytes(8))
                    connection.sendall(message)
                    readers -= 1


def _read(connection: socket.socket, size: int) -> bytearray:
    found = bytearray(size)
    view = memoryview(found)
    while view:
        read = connection.recv_into(view)
        if not read:
            raise ConnectionError("it ended")
        view = view[read:]
    return found

"""Messages over TCP: whole, to as many readers as are expected, and to no stranger."""

import socket
from threading import Thread

import numpy as np
import pytest

from specjax.parallel.streams import _reachable_host, offer, receive


@pytest.mark.parametrize("coordinator", ["127.0.0.1:9", "localhost:9"])
def test_every_reader_gets_the_message_and_no_stranger_does(coordinator: str) -> None:
    message = np.random.default_rng(0).bytes(3 * 2**20 + 1)
    address, thread = offer(message, 2, coordinator)
    secret, host, port = address.split("@")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(bytes(len(secret) // 2))
        assert stranger.recv(1) == b""
    # One that hangs up, or says nothing, is no reader, and holds nobody up.
    socket.create_connection((host, int(port))).close()
    silent = socket.create_connection((host, int(port)))
    assert receive(address) == message and thread.is_alive()
    assert receive(address) == message
    thread.join(5)
    silent.close()
    assert not thread.is_alive()


def test_on_the_host_of_the_coordinator_others_are_told_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Debian is the host, its own name is a loopback."""
    found = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *args, **options: found("127.0.1.1", *args, **options))
    assert _reachable_host("head.cluster:80") == "head.cluster"


def test_the_end_of_the_sender_is_said() -> None:
    address, thread = offer(b"", 1, "127.0.0.1:9")
    assert receive(address) == b""
    thread.join(5)
    with pytest.raises(ConnectionError, match="connection closed by the process at 127.0.0.1"):
        receive(address)
    with socket.create_server(("127.0.0.1", 0)) as ending:
        Thread(target=lambda: ending.accept()[0].close()).start()
        with pytest.raises(ConnectionError, match="which was sending"):
            receive(f"00@127.0.0.1@{ending.getsockname()[1]}")

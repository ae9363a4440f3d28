"""Messages over TCP, whole and to as many readers as are expected. `tests.faults.test_strangers` has the others."""

import socket

import numpy as np
import pytest

from specjax.parallel.streams import _reachable_host, offer, receive


@pytest.mark.parametrize("coordinator", ["127.0.0.1:9", "localhost:9"])
def test_every_reader_gets_the_message_until_the_sender_ends(coordinator: str) -> None:
    message = np.random.default_rng(0).bytes(3 * 2**20 + 1)
    address, thread = offer(message, 2, coordinator)
    assert receive(address, 0) == message and thread.is_alive()
    assert receive(address, 2) == message
    thread.join(5)
    assert not thread.is_alive()
    host = coordinator.partition(":")[0]
    with pytest.raises(ConnectionError, match=f"connection closed by the process at {host}, which was sending"):
        receive(address, 2)


def test_on_the_host_of_the_coordinator_others_are_told_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Debian is the host, its own name is a loopback."""
    found = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *args, **options: found("127.0.1.1", *args, **options))
    assert _reachable_host("head.cluster:80") == "head.cluster"

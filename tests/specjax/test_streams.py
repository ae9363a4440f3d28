"""Messages over TCP: whole, to as many readers as are expected, and to no stranger."""

import socket
from threading import Thread

import numpy as np
import pytest

from specjax.parallel.streams import offer, receive


@pytest.mark.parametrize("towards", ["127.0.0.1:9", "localhost:9"])
def test_every_reader_gets_the_message_and_no_stranger_does(towards: str) -> None:
    message = np.random.default_rng(0).bytes(3 * 2**20 + 1)
    address, thread = offer(message, 2, towards)
    secret, host, port = address.split("@")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(bytes(len(secret) // 2))
        assert stranger.recv(1) == b""
    # One that hangs up is no reader.
    socket.create_connection((host, int(port))).close()
    assert receive(address) == message and thread.is_alive()
    assert receive(address) == message
    thread.join(5)
    assert not thread.is_alive()


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

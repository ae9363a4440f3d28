"""Processes of a job find each other, or each ends with a one-line reason."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from configs.schema import HostsConfig
from launch.cli.errors import RunStopped
from launch.cli.rendezvous import wait_for_all
from tests.jobs import free_port


def call_all(*processes: tuple[int, int], port: int | None = None, within_s: float = 20.0) -> list[str]:
    """Call from one thread per (index, count). Return each one's error without the coordinator's address, or ""."""
    address = f"localhost:{port or free_port()}"

    def call(index: int, count: int) -> str:
        try:
            wait_for_all(HostsConfig(address, count, index), within_s)
        except RunStopped as refusal:
            return str(refusal).removeprefix(f"hosts.coordinator = {address}: ")
        return ""

    with ThreadPoolExecutor(len(processes)) as threads:
        return list(threads.map(call, *zip(*processes, strict=True)))


def test_all_processes_are_found() -> None:
    assert call_all((0, 3), (1, 3), (2, 3)) == [""] * 3


def test_two_processes_of_one_index_are_refused_in_each() -> None:
    assert call_all((0, 3), (1, 3), (1, 3)) == ["two processes have hosts.index = 1"] * 3


def test_different_counts_are_refused_in_each() -> None:
    assert call_all((0, 2), (2, 3)) == ["process 2 has hosts.count = 3, and process 0 has 2"] * 2


def test_a_missing_process_is_named_in_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.cli.rendezvous._RETRY_S", 0.02)  # process 1 may call before process 0 listens
    assert call_all((0, 3), (1, 3), within_s=2.0) == ["process 2 is missing after 2 s"] * 2


@pytest.mark.parametrize("index", [0, 1])
def test_a_port_of_another_program_is_refused(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launch.cli.rendezvous._CALL_WITHIN_S", 0.1)
    with socket.create_server(("", 0)) as other:
        (refusal,) = call_all((index, 2), port=other.getsockname()[1], within_s=0.2)
    expected = (
        "process 0 cannot open the port: Address already in use",
        "process 0 is missing after 0 s: another program",
    )
    assert refusal.startswith(expected[index])


def test_an_unknown_host_is_refused() -> None:
    with pytest.raises(RunStopped, match="nowhere.invalid:1: process 0 is missing after 0 s: "):
        wait_for_all(HostsConfig("nowhere.invalid:1", 2, 1), 0.1)


def test_other_callers_and_a_restarted_process_are_tolerated() -> None:
    port = free_port()

    def disturb() -> None:
        for text in (b"GET / HTTP/1.1\r\n", b"[1, 3]\n"):
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:
                try:
                    with socket.create_connection(("localhost", port)) as connection:
                        connection.sendall(text)
                    break
                except OSError:
                    time.sleep(0.01)

    threading.Timer(0.5, call_all, [(1, 3), (2, 3)], {"port": port}).start()
    threading.Thread(target=disturb).start()
    assert call_all((0, 3), port=port) == [""]

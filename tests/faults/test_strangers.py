"""Strangers at the ports of a job: where its processes meet, and where they pass large messages."""

import errno
import io
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from threading import Thread

import pytest

from configs.schema import HostsConfig
from launch.cli.program import run_program
from launch.console import ProgressConsole
from launch.errors import ConfigError, RunStopped
from launch.jobs import failures, rendezvous
from launch.jobs.rendezvous import wait_for_all
from specjax.parallel import listener, streams
from specjax.parallel.listener import Listener, NotAdmittedError, call, read, read_line, send
from specjax.parallel.streams import offer, receive
from tests.jobs import free_port

MESSAGE = b"message " * 2**18
WITHIN_S = 60.0
# Ports at which process 0 waits for process 1: yield the port, and what process 1 does there, which fails if it fails.
Port = Callable[[], AbstractContextManager[tuple[int, Callable[[], None]]]]


@contextmanager
def meeting() -> Iterator[tuple[int, Callable[[], None]]]:
    address = f"localhost:{free_port()}"
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(wait_for_all, HostsConfig(address, 2, 0), WITHIN_S)

        def meet() -> None:
            wait_for_all(HostsConfig(address, 2, 1), WITHIN_S)
            found.result(WITHIN_S)

        yield int(address.partition(":")[2]), meet


@contextmanager
def offering() -> Iterator[tuple[int, Callable[[], None]]]:
    address, thread = offer(MESSAGE, 1, "localhost:9")

    def get() -> None:
        assert receive(address, 1) == MESSAGE
        thread.join(WITHIN_S)
        assert not thread.is_alive()

    yield int(address.split("@")[1]), get


PORTS = pytest.mark.parametrize("port_of", [meeting, offering])


def connect(port: int) -> socket.socket:
    """Return a stranger's connection to a port that will be opened."""
    deadline = time.monotonic() + WITHIN_S
    while True:
        with suppress(ConnectionRefusedError):
            return socket.create_connection(("localhost", port), WITHIN_S)
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Clock:
    """Clock of this process and of its deadlines, which can be put ahead."""

    sleep = staticmethod(time.sleep)

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead_s

    def put_ahead(self, by_s: float) -> None:
        self._ahead_s += by_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (listener, streams, rendezvous):
        monkeypatch.setattr(module, "time", clock)
    return clock


def trickle(connection: socket.socket, clock: Clock, within_s: float = 2 * WITHIN_S) -> None:
    """Send one byte after the other until the other side hangs up. `within_s` are over after the first. Closes it."""
    with connection, suppress(OSError):
        connection.sendall(b"x")
        clock.put_ahead(within_s)
        while True:
            connection.sendall(b"x")
            time.sleep(0.01)


@PORTS
@pytest.mark.parametrize("number", [3, 100])
def test_row_82_connections_that_say_nothing_hold_nobody_up(port_of: Port, number: int) -> None:
    with port_of() as (port, come), ExitStack() as stack:
        for _ in range(number):
            stack.enter_context(connect(port))
        come()


LENGTH = (2**63).to_bytes(8)


@PORTS
@pytest.mark.parametrize("text", [LENGTH + b"\n", LENGTH * 10**5, b"GET / HTTP/1.1\r\n", b"[" * 4000 + b"\n", b"\n"])
def test_row_82_a_stranger_gets_a_challenge_and_no_more(port_of: Port, text: bytes) -> None:
    with port_of() as (port, come):
        with connect(port) as stranger, suppress(ConnectionError):
            challenge = read(stranger, 32, time.monotonic() + WITHIN_S)
            stranger.sendall(text)
            assert len(challenge) == 32 and stranger.recv(1) == b""
        come()


@PORTS
def test_row_82_one_byte_after_the_other_is_cut_off_at_the_deadline(port_of: Port, clock: Clock) -> None:
    with port_of() as (port, come), connect(port) as stranger:
        read(stranger, 32, clock.monotonic() + WITHIN_S)
        trickle(stranger, clock, listener.ANSWER_WITHIN_S)
        come()


@pytest.mark.parametrize("read_", [lambda end, deadline: read(end, 10**6, deadline), read_line])
def test_row_82_a_read_ends_at_its_deadline_whatever_comes(
    read_: Callable[[socket.socket, float], object], clock: Clock
) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        deadline = clock.monotonic() + WITHIN_S
        Thread(target=trickle, args=(theirs, clock), daemon=True).start()
        with pytest.raises(TimeoutError):
            read_(ours, deadline)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("move", [lambda end, deadline: read(end, 9, deadline), partial(send, message=MESSAGE)])
def test_row_82_a_transfer_that_stalls_ends_before_its_deadline(
    move: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_STALLED_S", 0.1)
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(TimeoutError):
        move(ours, deadline=time.monotonic() + 10 * WITHIN_S)


def test_row_82_a_sender_that_sends_slowly_is_given_up(clock: Clock) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        Thread(target=lambda: trickle(server.accept()[0], clock), daemon=True).start()
        with pytest.raises(ConnectionError, match="connection closed by the process at 127.0.0.1, which was sending"):
            receive(f"127.0.0.1@{server.getsockname()[1]}@9@00", 1)


@pytest.mark.parametrize("size", ["9223372036854775808", str(2**62), "-1", "9" * 5000, "1e3", "", "7@7"])
def test_row_82_another_length_than_that_of_the_message_is_one_line(size: str) -> None:
    address, _ = offer(b"message", 1, "127.0.0.1:9")
    with pytest.raises(ConnectionError, match="connection closed by the process at 127.0.0.1, [^\n]*$"):
        receive(address.replace("@7@", f"@{size}@"), 1)


def test_row_82_recorded_bytes_are_no_use() -> None:
    """Neither to a stranger who sends what a reader has sent, nor to one who sends what the sender has sent."""
    address, thread = offer(MESSAGE, 2, "127.0.0.1:9")
    host, port, *others = address.split("@")
    with socket.create_server((host, 0)) as relay, ThreadPoolExecutor(1) as threads:
        relayed = threads.submit(record, relay, int(port))
        assert receive("@".join([host, str(relay.getsockname()[1]), *others]), 1) == MESSAGE
        asked, answered = relayed.result(WITHIN_S)
    assert MESSAGE in answered and len(asked) > 64
    with connect(int(port)) as stranger:
        read(stranger, 32, time.monotonic() + WITHIN_S)
        stranger.sendall(asked)
        assert stranger.recv(1) == b""
    with socket.create_server((host, 0)) as server:
        Thread(target=answer, args=(server, answered), daemon=True).start()
        key = address.rpartition("@")[2]
        with pytest.raises(NotAdmittedError):
            call(host, server.getsockname()[1], bytes.fromhex(key), 1, time.monotonic() + WITHIN_S)
    # The stranger is not counted as a reader.
    assert thread.is_alive() and receive(address, 2) == MESSAGE
    thread.join(WITHIN_S)
    assert not thread.is_alive()


def answer(server: socket.socket, text: bytes) -> None:
    with server.accept()[0] as connection, suppress(OSError):
        connection.sendall(text)


def record(relay: socket.socket, port: int) -> tuple[bytes, bytes]:
    """Pass the bytes of a caller on to a port, and its answer back. Return what both have sent."""
    with relay.accept()[0] as caller, connect(port) as server:
        answered = bytes(read(server, 32, time.monotonic() + WITHIN_S))
        caller.sendall(answered)
        asked = caller.recv(10**4)
        server.sendall(asked)
        while part := server.recv(2**20):
            caller.sendall(part)
            answered += part
    return asked, answered


def test_row_82_a_reader_that_fails_and_comes_again_counts_once() -> None:
    address, thread = offer(MESSAGE, 2, "127.0.0.1:9")
    host, port, _, key = address.split("@")
    for _ in range(3):
        with call(host, int(port), bytes.fromhex(key), 1, time.monotonic() + WITHIN_S) as failing:
            failing.recv(1)
        assert receive(address, 1) == MESSAGE
    assert thread.is_alive() and receive(address, 2) == MESSAGE
    thread.join(WITHIN_S)
    assert not thread.is_alive()


def test_row_82_without_descriptors_no_one_is_accepted_in_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(server: socket.socket) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    pauses = list[float]()
    with Listener(0, b"", 1) as server, connect(server.port):
        with monkeypatch.context() as patch:
            patch.setattr(socket.socket, "accept", refuse)
            patch.setattr(listener.time, "sleep", pauses.append)
            assert server.accept(WITHIN_S) == [] and pauses == [0.1]


# A process with 64 descriptors at both kinds of ports. It opens files while strangers call, then waits for process 1.
SMALL = """
import resource, sys
from configs.schema import HostsConfig
from launch.jobs.rendezvous import wait_for_all
from specjax.parallel.streams import offer
from threading import Thread
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
address, sending = offer(b"message", 1, "localhost:9")
met = Thread(target=wait_for_all, args=(HostsConfig(sys.argv[1], 2, 0), 100))
met.start()
print(address, flush=True)
for _ in sys.stdin:
    files = [open("/dev/null") for _ in range(20)]
    print(len(files), flush=True)
    for file in files:
        file.close()
met.join()
sending.join()
"""


def test_row_82_a_process_with_few_descriptors_can_open_files_while_100_strangers_call() -> None:
    coordinator = f"localhost:{free_port()}"
    command = [sys.executable, "-c", SMALL, coordinator]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with ExitStack() as stack, subprocess.Popen(command, text=True, **pipes) as process:
        address = process.stdout.readline().strip()
        for port in [coordinator.partition(":")[2], address.split("@")[1]] * 100:
            stack.enter_context(connect(int(port)))
        for _ in range(3):
            process.stdin.write("open\n")
            process.stdin.flush()
            assert process.stdout.readline() == "20\n"
        process.stdin.close()
        assert receive(address, 1) == b"message"
        wait_for_all(HostsConfig(coordinator, 2, 1), WITHIN_S)
        assert process.wait(WITHIN_S) == 0


# Processes that meet.


def meet(index: int, count: int, port: int, within_s: float) -> str:
    """Return why a process does not begin, "" if it does."""
    try:
        wait_for_all(HostsConfig(f"localhost:{port}", count, index), within_s)
    except RunStopped as refusal:
        return str(refusal).removeprefix(f"hosts.coordinator = localhost:{port}: ")
    return ""


@contextmanager
def waiting(count: int, within_s: float) -> Iterator[tuple[int, "Future[str]"]]:
    """Yield the port at which process 0 waits, and what it says in the end."""
    port = free_port()
    with ThreadPoolExecutor(1) as threads:
        yield port, threads.submit(meet, 0, count, port, within_s)


def arrive(port: int, message: object) -> socket.socket:
    """Return the connection of a process of the job that has called process 0."""
    connect(port).close()  # waits for the port
    return call("localhost", port, b"", message, time.monotonic() + WITHIN_S)


@pytest.mark.timeout(60)
def test_row_81_process_0_keeps_its_deadline_whoever_calls(clock: Clock) -> None:
    with waiting(2, WITHIN_S) as (port, said), ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(connect(port))
        heard = stack.enter_context(connect(port))
        read(heard, 32, clock.monotonic() + WITHIN_S)
        Thread(target=trickle, args=(heard, clock), daemon=True).start()
        assert said.result() == "process 1 is missing after 60 s"


@pytest.mark.timeout(60)
def test_row_81_a_process_keeps_its_deadline_whatever_answers_it(clock: Clock) -> None:
    with socket.create_server(("localhost", 0)) as server:
        Thread(target=lambda: trickle(server.accept()[0], clock), daemon=True).start()
        said = meet(1, 2, server.getsockname()[1], WITHIN_S)
    assert said == "process 0 is missing after 60 s: another program, or an ending run, has the port"


def test_row_81_process_0_begins_only_while_all_are_there(clock: Clock) -> None:
    with waiting(3, WITHIN_S) as (port, said):
        arrive(port, [1, 3, ""]).close()  # it gives up
        with arrive(port, [2, 3, ""]) as second:
            clock.put_ahead(WITHIN_S)
            assert said.result() == "process 1 is missing after 60 s"
            assert json.loads(read_line(second, clock.monotonic() + WITHIN_S)) == said.result()


def test_row_81_a_process_that_comes_and_fails_may_come_again() -> None:
    with waiting(3, WITHIN_S) as (port, said), ThreadPoolExecutor(1) as threads:
        for _ in range(3):
            arrive(port, [1, 3, ""]).close()
        again = threads.submit(meet, 1, 3, port, WITHIN_S)
        assert meet(2, 3, port, WITHIN_S) == again.result() == said.result() == ""


# Text of others.

HOSTILE = "one\x1b[2J\x1b]0;title\x07\ntwo\r\u202ethree\ud83d" + "x" * 300
CLEAN = "one [2J ]0;title two three x"


def is_clean(line: str) -> bool:
    return CLEAN in line and line.isprintable() and len(line) < 500


def test_the_console_shows_text_without_what_a_terminal_obeys() -> None:
    console = ProgressConsole(file=io.StringIO(), soft_wrap=True)
    console.print(HOSTILE[:-300] + "\tfour")
    assert console.file.getvalue() == "one [2J ]0;title \ntwo  three      four\n"  # pyright: ignore[reportAttributeAccessIssue]


def test_row_83_text_of_a_process_that_failed_before_the_job_is_one_clean_line() -> None:
    with waiting(2, WITHIN_S) as (port, said), arrive(port, [1, 2, HOSTILE]):
        assert is_clean(said.result()) and said.result().startswith("process 1 failed: one")


def test_row_83_text_of_a_process_that_failed_within_the_job_is_one_clean_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(failures.jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(failures.processes, "read_messages", lambda topic: [f"1.0 3 process 1 on anna: {HOSTILE}"])
    for name in ("_POLL_S", "_GRACE_S", "_PRIMARY_LATER_S"):
        monkeypatch.setattr(failures, name, 0.0)
    codes = list[int]()
    monkeypatch.setattr(failures.os, "_exit", codes.append)
    failures._watch(primary=False)
    (line,) = capsys.readouterr().err.splitlines()
    assert codes == [3] and is_clean(line) and line.startswith("error: ended by process 1 on anna: one")


@pytest.mark.parametrize("error", [ConfigError(HOSTILE), RunStopped(HOSTILE), OSError(HOSTILE)])
def test_row_83_an_error_is_printed_as_one_clean_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(argv: list[str]) -> int:
        raise error

    monkeypatch.setattr(sys, "argv", ["x"])
    assert run_program(fail) in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert is_clean(line)

"""Helpers that start jobs of several processes on this machine and collect their output."""

import contextlib
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.conftest import FLAGS


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextlib.contextmanager
def two_hosts(directory: Path) -> Iterator[list[list[str]]]:
    """Simulate hosts 10.77.0.1 and 10.77.0.2, and yield the command prefix that runs a program on each.

    Each is a network namespace, in which this machine's name resolves to its address. Skips the test if not permitted.
    """
    names = [f"specjax{os.getpid()}{side}" for side in "ab"]
    commands = [f"netns add {name}" for name in names]
    commands += [f"link add eth0 netns {names[0]} type veth peer name eth0 netns {names[1]}"]
    for number, name in enumerate(names, 1):
        commands += [f"-n {name} addr add 10.77.0.{number}/24 dev eth0"]
        commands += [f"-n {name} link set {device} up" for device in ("eth0", "lo")]
        (directory / name).write_text(f"127.0.0.1 localhost\n10.77.0.{number} {platform.node()}\n")
    bind = 'mount --bind "$0" /etc/hosts && exec "$@"'
    try:
        for command in commands:
            if subprocess.run(f"ip {command}", shell=True, capture_output=True).returncode:
                pytest.skip(f"not permitted: ip {command}")
        yield [[*f"ip netns exec {name} unshare --mount sh -c".split(), bind, str(directory / name)] for name in names]
    finally:
        for name in names:
            subprocess.run(f"ip netns del {name}", shell=True, capture_output=True)


def start_job(
    arguments: Sequence[str],
    count: int,
    devices: int,
    port: int | None = None,
    address: str = "127.0.0.1",
    hosts: Sequence[Sequence[str]] | None = None,
) -> list["subprocess.Popen[str]"]:
    """Start `python ARGUMENTS --hosts.coordinator .. --hosts.count .. --hosts.index ..` in `count` processes.

    hosts: command prefix of each process.
    """
    environment = os.environ | {"XLA_FLAGS": FLAGS.replace("device_count=8", f"device_count={devices}")}
    coordinator = f"{address}:{port or free_port()}"
    options = ["--hosts.coordinator", coordinator, "--hosts.count", str(count), "--hosts.index"]
    return [
        subprocess.Popen(
            [*(hosts[index] if hosts else ()), sys.executable, *arguments, *options, str(index)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for index in range(count)
    ]


def finish_job(job: Sequence["subprocess.Popen[str]"], code: int = 0, within_s: float = 300) -> list[str]:
    """Wait until every process has ended with this exit code. Return what each printed."""
    try:
        printed = [process.communicate(timeout=within_s) for process in job]
    finally:
        for process in job:
            process.kill()
    for process, (_, errors) in zip(job, printed, strict=True):
        assert process.returncode == code, errors
    return [out for out, _ in printed]

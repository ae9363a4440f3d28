"""Jobs of several processes on this machine: how they are started, and what they print."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence

import jax

from tests.conftest import FLAGS


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def start_job(
    arguments: Sequence[str], count: int, devices: int, port: int | None = None
) -> list["subprocess.Popen[str]"]:
    """Start `python ARGUMENTS --hosts.coordinator .. --hosts.count .. --hosts.index ..` in `count` processes."""
    cache = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    flags = FLAGS.replace("device_count=8", f"device_count={devices}")
    environment = os.environ | {
        "XLA_FLAGS": flags,
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.05",
    }
    hosts = ["--hosts.coordinator", f"127.0.0.1:{port or free_port()}", "--hosts.count", str(count), "--hosts.index"]
    return [
        subprocess.Popen(
            [sys.executable, *arguments, *hosts, str(index)],
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

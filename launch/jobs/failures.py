"""A process of a job that fails ends the others at once. They would wait for it, until JAX aborts them."""

import os
import platform
import re
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from threading import Event, Thread
from typing import NoReturn

import jax

from configs.schema import HostsConfig
from launch.errors import first_line, one_line
from launch.jobs.rendezvous import tell_failure
from specjax.parallel import processes

TOPIC = "failures"
# Exit code of a process that ends because another one of its job died. JAX uses the same code, the one of an abort.
LOST_PEER = 134
# Start of the line that reports it.
LOST = "error: lost a process of the job:"
# Time to wait until JAX names the lost process. If this process ended at once, it would count as dead too.
_NAMED_WITHIN_S = 60
_CONTACT_ERRORS = re.compile(
    "gloo|nccl|connection (closed|reset|refused)|socket closed|coordination|heartbeat|barrier", re.IGNORECASE
)
_POLL_S = 0.5
# A process that fails by itself at the same time says so, and is not ended by another's failure.
_GRACE_S = 1.0
# Process 0 ends so much later than the others: JAX aborts those that have lost it.
_PRIMARY_LATER_S = 2.0
# Letters of the message that passes to the others.
_MESSAGE_LETTERS = 300

_failing = Event()


def watch() -> None:
    """Start a thread that ends this process once another one of the job has failed."""
    Thread(target=_watch, args=(processes.primary(),), daemon=True, name="failures").start()


def fail(code: int, message: str, argv: Sequence[str]) -> int:
    """Tell the other processes of the job, if there are any, that this one ends, and return its exit code.

    In a job that has begun, it does not return: an ordinary exit would wait for the others.

    message: the line that this process has printed. argv: its command line, which names a job that has not begun.
    """
    message = one_line(message, _MESSAGE_LETTERS)
    if processes.count() == 1:
        if (hosts := _hosts_of(argv)).count > 1:
            print("telling the other processes of the job ..", file=sys.stderr, flush=True)
            tell_failure(hosts, message)
        return code
    return end_job(code, message, processes.index())


def end_job(code: int, message: str, index: int) -> NoReturn:
    """End a job that has begun, because of a failure of its process `index`, which is this one."""
    _failing.set()
    # Telling fails if process 0 is gone.
    with suppress(Exception):
        processes.tell(TOPIC, f"{time.time()} {code} process {index} on {platform.node()}: {message}")
    _end(code, index == 0)


def means_lost_peer(error: Exception) -> bool:
    """Return True if an error says that another process of the job is gone. JAX raises it in several types."""
    unreachable = isinstance(error, jax.errors.JaxRuntimeError) and "UNAVAILABLE" in str(error)
    return processes.count() > 1 and (unreachable or _CONTACT_ERRORS.search(str(error)) is not None)


def lose(error: Exception) -> NoReturn:
    """End this process after the loss of another one. Waits first: JAX names the lost process and ends this one."""
    print(LOST, first_line(error), file=sys.stderr, flush=True)
    time.sleep(_NAMED_WITHIN_S)
    os._exit(LOST_PEER)  # a normal exit would wait for the lost process


def _watch(primary: bool) -> None:
    failures = list[str]()
    while not failures and jax.distributed.is_initialized():
        time.sleep(_POLL_S)
        # At a normal end JAX leaves the job during a read.
        with suppress(Exception):
            failures = processes.read_messages(TOPIC)
    time.sleep(_GRACE_S)
    if failures and not _failing.is_set():
        _, code, message = min(failures).split(" ", 2)
        print("error: ended by", one_line(message), file=sys.stderr)
        _end(int(code), primary)


def _end(code: int, primary: bool) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if primary:
        time.sleep(_POLL_S + _GRACE_S + _PRIMARY_LATER_S)
    os._exit(code)


def _hosts_of(argv: Sequence[str]) -> HostsConfig:
    """Return the job that a command line names; one process if it names none."""
    given = {}
    for word, after in zip(argv, [*argv[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name.startswith("--hosts."):
            given[name.removeprefix("--hosts.")] = value if equals else after
    with suppress(KeyError, ValueError):
        return HostsConfig(given["coordinator"], int(given["count"]), int(given.get("index", 0)))
    return HostsConfig()

"""The frame of every program: its exit code, what it says of errors, and the compile cache."""

import logging
import os
import platform
import select
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import jax

from launch.errors import ConfigError, RunStopped, Stopped, first_line, one_line
from launch.jobs.failures import fail, lose, means_lost_peer
from launch.phases.signals import owning_process
from specjax.parallel import processes


@owning_process()
def run_program(main: Callable[[list[str]], int]) -> int:
    """Call `main` with the command line's arguments. Return the exit code.

    Some exceptions end the program with a line on stderr: ConfigError, with a line for each refusal, with exit code 2,
    RunStopped and OSError (a full disk) with 1, Stopped and Ctrl-C with 128 + signal, the loss of another process of
    the job with LOST_PEER. Any other exception is a bug: it propagates, or with several processes is printed, with exit
    code 1. A process that fails in one of these ways, other than by a signal, ends the others of its job. If stdout is
    a closed pipe (`--help | head`), the exit code is 128 + SIGPIPE.
    """
    _silence_writers()
    plain_warnings()
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
        processes.gather(None)  # a process that ends before the others counts as dead
        return code
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return 128 + stopped.signal
    except SystemExit:  # raised by --help
        if _drop_unread_output():
            return 128 + signal.SIGPIPE
        raise
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if means_lost_peer(error):
            lose(error)
        if not isinstance(error, ConfigError | RunStopped | OSError):
            if processes.count() == 1:
                raise
            traceback.print_exc()
            return fail(1, f"{type(error).__name__}: {first_line(error)}", sys.argv)
        if isinstance(error, BrokenPipeError) and _drop_unread_output():
            return 128 + signal.SIGPIPE
        error_of = "error:" if processes.primary() else f"process {processes.index()} on {platform.node()}: error:"
        refused = isinstance(error, ConfigError)
        messages = [one_line(message) for message in (error.args if refused else [error])]
        for message in messages:
            print(error_of, message, file=sys.stderr)
        if isinstance(error, RunStopped) and processes.count() == 1:
            return 1  # a job that did not begin has told all of its processes
        return fail(2 if refused else 1, "; ".join(messages), sys.argv)


def _drop_unread_output() -> bool:
    """If stdout is a closed pipe, drop buffered and later output and return True."""
    try:
        sys.stdout.flush()
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        unread = any(event & select.POLLERR for _, event in poll.poll(0))
    except BrokenPipeError:
        unread = True
    except (OSError, ValueError):  # stdout is no file
        unread = False
    if unread:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return unread


def use_compile_cache() -> None:
    """Keep compiled programs in $SPECJAX_CACHE (default: ~/.cache/specjax/jax), unless JAX already has a cache."""
    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        directory = os.environ.get("SPECJAX_CACHE") or Path.home() / ".cache" / "specjax" / "jax"
        jax.config.update("jax_compilation_cache_dir", str(directory))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def plain_warnings() -> None:
    """Let warnings of the logging module begin as others of a program do, without the name of a Python module."""
    # Libraries install this handler while they are imported, after which basicConfig has no effect.
    for handler in logging.root.handlers:
        if type(handler) is logging.StreamHandler:
            handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))


def _silence_writers() -> None:
    """Drop messages of Orbax's and TensorStore's threads about a failed write. The same error is also raised.

    After the first error, Orbax closes its event loop, but the threads of other arrays still report to it.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    report = sys.unraisablehook

    def drop(unraisable: "sys.UnraisableHookArgs") -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            report(unraisable)

    sys.unraisablehook = drop

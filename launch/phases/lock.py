"""An exclusive lock on a directory that a program writes to."""

import contextlib
import datetime
import fcntl
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from launch.errors import ConfigError
from specjax.parallel import processes

LOCK_FILE = ".lock"


@contextlib.contextmanager
def exclusive(option: str, directory: Path, *, new: bool = False, value: str | None = None) -> Iterator[None]:
    """Create a directory with its parents, and hold a lock on it. Directories created here and left empty are removed.

    The operating system releases the lock when the process ends in any way. Raises ConfigError if the directory cannot
    be created or written to, or if another process has the lock (naming that process).

    new:   raise FileExistsError if the directory exists.
    value: the option's value for error messages, if it is not the directory.
    """
    setting = f"{option} = {value or directory}"
    new_directories = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        directory.mkdir(parents=True, exist_ok=not new)
    except OSError as error:
        if new and isinstance(error, FileExistsError):
            raise
        raise ConfigError(f"{setting}: cannot make a directory there: {error.strerror}") from None
    file = _lock(setting, directory)
    with file:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}, since {datetime.datetime.now():%Y-%m-%d %H:%M:%S}")
        file.flush()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                (directory / LOCK_FILE).unlink()
                for path in new_directories:
                    path.rmdir()


@contextlib.contextmanager
def held_by_primary(lock: contextlib.AbstractContextManager[None]) -> Iterator[None]:
    """Hold a lock of `exclusive` in the primary process, for all processes. If that fails, all raise its error."""
    with contextlib.ExitStack() as stack:
        processes.on_primary(lambda: stack.enter_context(lock))
        yield


def _lock(setting: str, directory: Path) -> IO[str]:
    path = directory / LOCK_FILE
    while True:
        try:
            file = path.open("a+", encoding="utf-8")
        except OSError as error:
            reason = error.strerror or f"{path.name} must be a regular file"  # a pipe has no position
            raise ConfigError(f"{setting}: cannot be written: {reason}") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            raise ConfigError(
                f"{setting}: {holder} is writing to it; choose another path, or wait until it ends"
            ) from None
        except OSError as error:
            file.close()
            raise ConfigError(
                f"{setting}: cannot be locked: {error.strerror}; must be on a file system with locks"
            ) from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()  # its previous holder has just removed it

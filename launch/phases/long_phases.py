"""The long phases of a program: their states, kept until the program ends, and locks on its output files."""

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextvars import ContextVar, Token
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from launch.console import console
from launch.errors import ConfigError, as_config_error
from launch.phases.lock import LOCK_FILE, exclusive, held_by_primary
from launch.phases.long_phase import LongPhase, newest_state
from launch.phases.signals import StopSignals
from models.files import check_file, write_atomically
from specjax.checkpoint_integrity import DamagedSave, check_manifest
from specjax.parallel import processes

UNFINISHED = "unfinished"
OPTIONS = "options.txt"
DAMAGED = ".damaged"


class LongPhases:
    """The long phases of a program, each with its state on the disk until `remove` is called.

    In its `with` block, `long_phase` opens phases of it. Blocks may be nested: the innermost one counts.

    Args:
        directory: directory for the states. None: they are not kept.
        signals:   signals that stop a phase. None: none do.
        options:   text that must be the same in the process that continues. Raises ConfigError otherwise.

    Attributes:
        found: True if an earlier process left states.
    """

    def __init__(
        self,
        directory: Path | None = None,
        signals: StopSignals | None = None,
        options: str | None = None,
    ) -> None:
        self._directory, self._signals, self._options = directory, signals, options
        self._opened, self._outer = list[str](), list[Token[LongPhases]]()
        self.found = directory is not None and processes.on_primary(lambda: self._open(directory))

    def __enter__(self) -> "LongPhases":
        self._outer.append(_innermost.set(self))
        return self

    def __exit__(self, *exception: object) -> None:
        _innermost.reset(self._outer.pop())

    def _open(self, directory: Path) -> bool:
        """Return True if an earlier process left states. Raise ConfigError if its options were others."""
        if not directory.exists():
            return False
        if not directory.is_dir():
            raise ConfigError(f"{directory}: must be a directory; remove it to start again")
        if self._options is None:
            return True
        path = directory / OPTIONS
        if not path.exists():
            # A process was killed before it wrote its options, or while it removed the directory.
            self.remove()
            return True
        with as_config_error():
            check_file(path)
        if path.read_text(encoding="utf-8", errors="replace") != self._options:
            raise ConfigError(
                f"{directory}: left by an earlier process with other options; remove it to start again, or use "
                "the same options to continue"
            )
        return True

    def phase(self, name: str, total: int, unit: str, *, kept: bool = True, quiet: bool = False) -> LongPhase:
        """Return a phase of `total` units, for use in a `with` block.

        If its saved state is damaged, a line says so, and it starts again, as do the phases after it.

        name:  unique name of the phase in the program.
        kept:  False if it has no state, so that the next process starts it again. Within a part of the processes of a
               job, none has one.
        quiet: see Progress.
        """
        directory = None
        # To write a state, Orbax would wait for all processes of the job.
        if self._directory is not None and kept and not processes.in_subgroup():
            directory = self._directory / name
            processes.on_primary(partial(self._make, directory))
            self._opened.append(name)
        if not kept:
            advice = "it starts again next time"
        elif directory is None:
            advice = "nothing is kept"
        else:
            advice = "the same command goes on from there"
            if self._options is None:
                advice = f"--out {directory.parents[1]} --resume, in Python resume=True, goes on from there"
        return LongPhase(name, total, unit, directory, self._signals, advice, quiet)

    def remove(self) -> None:
        """Remove all states, at the end of the program or when its results are saved. A lock on the directory stays."""
        if not processes.primary() or self._directory is None or not self._directory.is_dir():
            return
        # Remove the options first: without them, the next process ignores states that are still there.
        (self._directory / OPTIONS).unlink(missing_ok=True)
        for path in self._directory.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != LOCK_FILE:
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it is locked
            self._directory.rmdir()

    def _make(self, phase: Path) -> None:
        self._check(phase)
        phase.mkdir(parents=True, exist_ok=True)
        if self._options is not None:
            write_atomically(phase.parent / OPTIONS, self._options)

    def _check(self, phase: Path) -> None:
        """If a phase's saved state is damaged, set it aside with the states of later phases, which depend on it."""
        try:
            if phase.exists() and not phase.is_dir():
                raise DamagedSave(f"{phase} is damaged: it is not a directory")
            if (saved := newest_state(phase)) is not None:
                check_manifest(saved)
        except DamagedSave as error:
            for path in list(phase.parent.iterdir()):
                if path.name not in (*self._opened, OPTIONS, LOCK_FILE) and path.suffix != DAMAGED:
                    shutil.rmtree(f"{path}{DAMAGED}", ignore_errors=True)
                    path.rename(f"{path}{DAMAGED}")
            console.print(f"{error}; renamed to *{DAMAGED}: {phase.name} and later phases start again")


NOT_KEPT = LongPhases()
"""Phases that nothing stops and whose states are kept nowhere."""

_innermost: ContextVar[LongPhases] = ContextVar("long_phases", default=NOT_KEPT)


def long_phase(name: str, total: int, unit: str, *, kept: bool = True, quiet: bool = False) -> LongPhase:
    """Return a phase of the program that runs (see `LongPhases.phase`). Outside of any, of `NOT_KEPT`."""
    return _innermost.get().phase(name, total, unit, kept=kept, quiet=quiet)


def options_text(*options: Any) -> str:
    """Return dataclasses of options as the text that `LongPhases` compares."""
    return json.dumps([asdict(each) for each in options], indent=1, default=str)


@contextlib.contextmanager
def long_phases_beside(files: Mapping[str, str | None], signals: StopSignals, *options: Any) -> Iterator[None]:
    """Keep the states of the block's long phases in FILE.unfinished, beside the first of a program's result files.

    The states are removed when the block ends normally. Without files, no states are kept. All files are locked during
    the block: raises ConfigError if another process writes to one.

    files: option to path, None if the option is not set.
    """
    with exclusive_files(files) as directories:
        with LongPhases(next(iter(directories), None), signals, options_text(*options)) as long_phases:
            yield
        long_phases.remove()


@contextlib.contextmanager
def exclusive_files(files: Mapping[str, str | None]) -> Iterator[list[Path]]:
    """Lock the files that a program writes, with a directory beside each (see `exclusive`). Yield these directories.

    files: option to path, None if the option is not set.
    """
    paths = {option: file for option, file in files.items() if file is not None}
    directories = [Path(f"{file}.{UNFINISHED}") for file in paths.values()]
    with contextlib.ExitStack() as locks:
        for (option, file), directory in zip(paths.items(), directories, strict=True):
            locks.enter_context(held_by_primary(exclusive(option, directory, value=file)))
        yield directories
    for directory in directories if processes.primary() else ():
        with contextlib.suppress(OSError):  # not empty, gone, or used by another process now
            directory.rmdir()

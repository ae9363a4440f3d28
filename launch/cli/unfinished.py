"""Long phases of a program: they show progress, stop at a signal, and another process goes on where they stopped."""

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from launch.cli.errors import ConfigError, Stopped
from launch.cli.progress import Progress
from launch.cli.signals import StopSignals
from models.files import new_directory
from specjax.types import PyTree
from specjax.writing import writing

UNFINISHED = "unfinished"
OPTIONS = "options.txt"
SAVE_EVERY_S = 300.0  # the most that a killed process can lose


class Unfinished:
    """The long phases of a program, each with its state on the disk until `remove` is called.

    Args:
        directory: where states are kept. None: nowhere.
        signals:   what stops a phase. None: nothing.
        options:   text that must be the same in the process that goes on. Raises ConfigError otherwise.

    Attributes:
        found: whether an earlier process left something.
    """

    def __init__(
        self, directory: Path | None = None, signals: StopSignals | None = None, options: str | None = None
    ) -> None:
        self._directory, self._signals, self._options = directory, signals, options
        self.found = directory is not None and directory.exists()
        if directory is not None and options is not None and (path := directory / OPTIONS).exists():
            if path.read_text(encoding="utf-8") != options:
                raise ConfigError(
                    f"{directory}: an earlier process with other options stopped here; must be removed to start "
                    "again, or give its options to go on"
                )

    def phase(self, name: str, total: int, unit: str) -> "Phase":
        """Return a phase of `total` units, for use in a `with` block."""
        directory = None
        if self._directory is not None:
            directory = self._directory / name
            self._directory.mkdir(parents=True, exist_ok=True)
            if self._options is not None:
                (self._directory / OPTIONS).write_text(self._options, encoding="utf-8")
            directory.mkdir(exist_ok=True)
        advice = "the same command goes on from there" if self._options is not None else "--resume goes on from there"
        return Phase(name, total, unit, directory, self._signals, "nothing is kept" if directory is None else advice)

    def remove(self) -> None:
        """Remove all states: the program has ended, or its results are saved."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


def options_text(*options: Any) -> str:
    """Return dataclasses of options as the text that `Unfinished` compares."""
    return json.dumps([asdict(each) for each in options], indent=1, default=str)


def unfinished_beside(results: str | None, signals: StopSignals, *options: Any) -> Unfinished:
    """Return phases that are kept beside a file of results, as FILE.unfinished; nowhere if there is none."""
    directory = None if results is None else Path(f"{results}.{UNFINISHED}")
    return Unfinished(directory, signals, options_text(*options))


class Phase(Progress):
    """A phase that shows its progress, and saves its state at its end, at a signal, and every SAVE_EVERY_S.

    It may be entered several times, if other work comes in between.

    directory: holds the state as a subdirectory, which is named by the number of finished units.
    done:      number of finished units, those of earlier processes included.
    advice:    how to go on after a stop.
    """

    def __init__(
        self, name: str, total: int, unit: str, directory: Path | None, signals: StopSignals | None, advice: str
    ) -> None:
        self._saved = None if directory is None else _newest(directory)
        super().__init__(name, total, unit, 0 if self._saved is None else int(self._saved.name))
        self._directory, self._signals, self._advice = directory, signals, advice
        self._saved_at = time.monotonic()

    def restore(self, part: str, default: PyTree = None) -> PyTree:
        """Return a part of the saved state with the structure and shardings of `default`; `default` if none is saved.

        Without a default, the part is a dict of numpy arrays, or None.
        """
        if self._saved is None:
            return default
        with ocp.PyTreeCheckpointer() as checkpointer:
            if default is None:
                return checkpointer.restore(self._saved / part)
            abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), default)
            arguments = ocp.checkpoint_utils.construct_restore_args(abstract)
            return checkpointer.restore(self._saved / part, item=abstract, restore_args=arguments)

    def finish(self, state: Mapping[str, PyTree], *, tokens: int = 0, note: str = "", save: bool = False) -> None:
        """Count a finished unit. Save the state, by parts, if it is time. Raises Stopped, after that, at a signal.

        state: empty if the phase cannot go on: then nothing is saved, and the next process starts it again.
        save:  save in any case, because other work comes before the next unit.
        """
        self.advance(1, tokens, note)
        signal = None if self._signals is None else self._signals.received
        save |= signal is not None or self.done >= self.total or time.monotonic() - self._saved_at > SAVE_EVERY_S
        if save and state and self._directory is not None:
            self._save(self._directory.absolute(), state)
        if signal is not None:
            advice = self._advice if state else "it starts again in the next process"
            raise Stopped(signal, f"{self.name}: stopped after {self.done} of {self.total} {self.unit}; {advice}")

    def _save(self, directory: Path, state: Mapping[str, PyTree]) -> None:
        path = directory / str(self.done)
        with writing(path, self._last_whole), new_directory(path) as saving, ocp.PyTreeCheckpointer() as checkpointer:
            for part, arrays in state.items():
                checkpointer.save(saving / part, arrays)
        for other in directory.iterdir():
            if other.name != str(self.done):
                shutil.rmtree(other)
        self._saved_at = time.monotonic()

    def _last_whole(self) -> str:
        saved = None if self._directory is None else _newest(self._directory)
        return f"{self.name}: " + ("nothing is saved" if saved is None else f"{saved.name} {self.unit} are saved")


def _newest(directory: Path) -> Path | None:
    found = {int(path.name): path.absolute() for path in directory.glob("*") if path.name.isdecimal()}
    return found[max(found)] if found else None

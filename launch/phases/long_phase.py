"""A long phase of a program, with a saved state from which another process can continue."""

import shutil
import time
from collections.abc import Hashable, Mapping
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from launch.errors import Stopped, as_config_error
from launch.phases.progress import Progress
from launch.phases.signals import StopSignals
from models.files import new_directory, one_line_errors
from specjax.checkpoint_integrity import write_manifest
from specjax.parallel import processes
from specjax.types import PyTree
from specjax.writing import writing

SAVE_EVERY_S = 300.0  # largest loss if a process is killed


class LongPhase(Progress):
    """A phase that shows its progress, and saves its state at its end, at a signal, and every SAVE_EVERY_S.

    It may be entered several times, with other work in between.

    directory: holds the state, in a subdirectory named by the number of finished units.
    done:      number of finished units, including units of earlier processes.
    advice:    text of the stop message that says how to continue.
    """

    def __init__(
        self,
        name: str,
        total: int,
        unit: str,
        directory: Path | None,
        signals: StopSignals | None,
        advice: str,
        quiet: bool = False,
    ) -> None:
        self._saved = None if directory is None else newest_state(directory)
        super().__init__(name, total, unit, 0 if self._saved is None else int(self._saved.name), quiet=quiet)
        self._directory, self._signals, self._advice = directory, signals, advice
        self._saved_at = time.monotonic()

    def restore(self, part: str, default: PyTree = None) -> PyTree:
        """Return a part of the saved state with the structure and shardings of `default`; `default` if none is saved.

        Without a default, the part is a dict of numpy arrays, or None. Raises ConfigError if the saved state does not
        belong to such a phase.
        """
        if self._saved is None:
            return default
        misfit = f"{self._saved}: cannot be restored; must be removed to start again"
        with as_config_error(), one_line_errors(misfit), ocp.PyTreeCheckpointer() as checkpointer:
            if default is None:
                return checkpointer.restore(self._saved / part)
            abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), default)
            arguments = ocp.checkpoint_utils.construct_restore_args(abstract)
            return checkpointer.restore(self._saved / part, item=abstract, restore_args=arguments)

    def finish(
        self,
        state: Mapping[str, PyTree] | None = None,
        *,
        tokens: int = 0,
        note: str = "",
        program: Hashable = None,
        save: bool = False,
    ) -> None:
        """Count a finished unit, and save the state if it is time. At a signal, save it and raise Stopped.

        state:   parts of the state; None for a phase that is not kept.
        program: see `advance`.
        save:    save now, because other work comes before the next unit.
        """
        self.advance(1, tokens, note, program)
        signal = None if self._signals is None else self._signals.received
        save |= signal is not None or self.done >= self.total
        save |= processes.agree(time.monotonic() - self._saved_at > SAVE_EVERY_S)
        if save and state is not None and self._directory is not None:
            self._save(self._directory.absolute(), state)
        if signal is not None:
            raise Stopped(signal, f"{self.name}: stopped after {self.done} of {self.total} {self.unit}; {self._advice}")

    def _save(self, directory: Path, state: Mapping[str, PyTree]) -> None:
        path = directory / str(self.done)
        with writing(path, self._last_whole), new_directory(path) as saving, ocp.PyTreeCheckpointer() as checkpointer:
            for part, arrays in state.items():
                checkpointer.save(saving / part, arrays)
            if processes.primary():
                write_manifest(saving)
        for other in directory.iterdir() if processes.primary() else ():
            if other.name != str(self.done):
                shutil.rmtree(other, ignore_errors=True)
        self._saved_at = time.monotonic()

    def _last_whole(self) -> str:
        saved = None if self._directory is None else newest_state(self._directory)
        return f"{self.name}: " + ("nothing is saved" if saved is None else f"{saved.name} {self.unit} are saved")


def newest_state(directory: Path) -> Path | None:
    """Return the path of the newest saved state in a phase's directory; None if there is none."""
    states = {int(path.name): path.absolute() for path in directory.glob("*") if path.name.isdecimal()}
    return states[max(states)] if states else None

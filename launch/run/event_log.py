"""What a run has to say beside its metrics: when and where it ran, what it warned of, how it ended."""

import datetime
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from launch.run.directory import cut_lines

DIARY_FILE = "diary.jsonl"
PACKAGES = ("specjax", "jax", "flax", "optax", "numpy")


class Diary:
    """Lines of diary.jsonl, each with the last step that was done: a `start`, a `warning` or a `result`.

    directory: of the run.
    step:      where the run begins, or is resumed; lines of later steps are dropped.
    """

    def __init__(self, directory: Path, console: Console, step: int = 0) -> None:
        self.directory = directory
        self._path, self._console = directory / DIARY_FILE, console
        cut_lines(self._path, step, every=True)
        self._write(step, "start", _surroundings())

    def warn(self, step: int, text: str, style: str | None = None) -> None:
        """Print a line of text and keep it."""
        self._console.print(text, style=style, markup=False)
        self.keep(step, text)

    def keep(self, step: int, text: str) -> None:
        """Keep a warning that is printed elsewhere."""
        self._write(step, "warning", text)

    def result(self, step: int, **values: float) -> None:
        """Keep what was measured once the steps were done."""
        self._write(step, "result", values)

    def _write(self, step: int, kind: str, value: Any) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, kind: value}) + "\n")


def _surroundings() -> dict[str, Any]:
    devices = jax.devices()
    installed = {distribution.metadata["Name"] for distribution in importlib.metadata.distributions()}
    versions = {name: importlib.metadata.version(name) for name in PACKAGES if name in installed}
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "device": f"{len(devices)} x {devices[0].device_kind}",
        "host": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {"Python": platform.python_version()} | versions,
    }

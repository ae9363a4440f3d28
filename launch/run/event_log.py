"""Event log of a run, diary.jsonl: where and when it ran, its warnings, its results."""

import datetime
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

import jax

from launch.cli.console import console
from launch.run.directory import EVENTS_FILE
from launch.run.history import cut_after
from specjax.parallel import processes

PACKAGES = ("specjax", "jax", "flax", "optax", "numpy")


class EventLog:
    """Writes one line per event (`start`, `warning`, `checkpoint` or `result`), with the last finished step.

    step: the step after which the run starts or resumes. Lines of later steps are dropped.
    """

    def __init__(self, directory: Path, step: int = 0) -> None:
        self._path = directory / EVENTS_FILE
        cut_after(self._path, step, every=True, report=console.print)
        self._write(step, "start", _environment())

    def warn(self, step: int, text: str, style: str | None = None) -> None:
        """Print a warning and write it."""
        console.print(text, style=style)
        self.record_warning(step, text)

    def record_warning(self, step: int, text: str) -> None:
        """Write a warning that is printed elsewhere."""
        self._write(step, "warning", text)

    def record_checkpoint(self, step: int) -> None:
        """Write that the checkpoint of a step is complete: if no checkpoint is there later, they were removed."""
        self._write(step, "checkpoint", "complete")

    def record_result(self, step: int, **values: float) -> None:
        """Write results that were measured after the last step."""
        self._write(step, "result", values)

    def _write(self, step: int, kind: str, value: Any) -> None:
        if processes.primary():
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, kind: value}) + "\n")


def _environment() -> dict[str, Any]:
    devices = jax.devices()
    installed = {distribution.metadata["Name"] for distribution in importlib.metadata.distributions()}
    versions = {name: importlib.metadata.version(name) for name in PACKAGES if name in installed}
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "device": f"{len(devices)} x {devices[0].device_kind}",
        "host": f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": {"Python": platform.python_version()} | versions,
    }

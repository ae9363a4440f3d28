"""Figures of the benchmarks, as PNG files. They need matplotlib."""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launch.errors import ConfigError


@contextmanager
def figure(path: Path, size: tuple[float, float] = (7, 4.5), columns: int = 1) -> Iterator[Any]:
    """Yield axes to draw into, an array of them for several columns, and save the figure."""
    plt = load_pyplot()
    fig, axes = plt.subplots(1, columns, figsize=size, layout="constrained")
    yield axes
    fig.savefig(path, dpi=150)
    plt.close(fig)


def label(axes: Any, x: str, y: str) -> None:
    """Label both axes, and the lines in a legend."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.legend(fontsize="small")


def load_pyplot() -> Any:
    """Return matplotlib.pyplot, set up to draw into files. Raises ConfigError if matplotlib is not installed."""
    try:
        importlib.import_module("matplotlib").use("agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise ConfigError("plots: matplotlib is not installed: pip install -e '.[bench]' in the clone") from error


def make_directory(option: str, path: str) -> None:
    """Create the directory and its parents. Raise ConfigError if that fails or it is not writable."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{option} = {path}: must be a directory that exists or can be created ({error.strerror})"
        ) from error
    if not os.access(path, os.W_OK):
        raise ConfigError(f"{option} = {path}: cannot be written")

"""Figures of the benchmarks, as PNG files. They need matplotlib."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launch.cli.pyplot import load_pyplot


@contextmanager
def figure(path: Path, size: tuple[float, float] = (7, 4.5), columns: int = 1) -> Iterator[Any]:
    """Yield axes to draw into, an array of them for several columns, and save the figure."""
    plt = load_pyplot()
    drawn, axes = plt.subplots(1, columns, figsize=size, layout="constrained")
    yield axes
    drawn.savefig(path, dpi=150)
    plt.close(drawn)


def label(axes: Any, x: str, y: str) -> None:
    """Label both axes, and the lines in a legend."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.legend(fontsize="small")

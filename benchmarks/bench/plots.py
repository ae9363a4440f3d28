"""Plots of the bench's results. They need matplotlib."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from benchmarks.bench.report import BenchSection
from benchmarks.plotting import figure, label

Lines = Mapping[str, list[tuple[float, float]]]


def save_plots(directory: Path, sections: Mapping[str, BenchSection]) -> None:
    """Write a PNG into the directory for each of the sections floor, peers and acceptance."""
    if (floor := sections.get("floor")) is not None:
        lines = _lines(floor, "context", "batch", "tokens/s")
        _draw(directory / "throughput.png", lines, "rows", "tokens/s, autoregressive", log=True)
    if (peers := sections.get("peers")) is not None:
        _draw(directory / "peers.png", _lines(peers, "sampler", "batch", "tokens/s"), "rows", "tokens/s", log=True)
    if (acceptance := sections.get("acceptance")) is not None:
        lines = _lines(acceptance, "rate", "k", "speed-up")
        _draw(directory / "speedup.png", lines, "draft length", "speed-up over autoregressive", level=1.0)


def _lines(section: BenchSection, label: str, x: str, y: str) -> Lines:
    """Return a line of points (x, y) for each value of the column `label`. Rows without a number are left out."""
    lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in section.rows:
        position, value = row[x], row.get(y)
        value = value[0] if isinstance(value, tuple) else value
        if isinstance(position, int | float) and isinstance(value, int | float):
            lines[f"{label} {row[label]}"].append((position, value))
    return lines


def _draw(path: Path, lines: Lines, x: str, y: str, log: bool = False, level: float | None = None) -> None:
    with figure(path) as axes:
        for name, points in lines.items():
            axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
        if log:
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
        if level is not None:
            axes.axhline(level, color="grey", linewidth=1)
        label(axes, x, y)

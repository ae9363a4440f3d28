"""Plots of a point and its neighbours. They need matplotlib."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.plotting import figure, label
from benchmarks.simulation.acceptance import acceptance_length, first_rate
from benchmarks.simulation.answer import resolve_pair, run
from benchmarks.simulation.estimate import estimate
from benchmarks.simulation.machine import Evidence, round_costs, sheet_model
from benchmarks.simulation.point import MEASURED, Point
from benchmarks.simulation.uncertainty import Interval, input_ranges

DRAFT_LENGTHS = (1, 2, 3, 4, 5, 6, 7)
LAGS = (0, 1, 2)
ROWS = np.unique(np.geomspace(1, 256, 25).round())
# Samples of an interval.
SAMPLES = 12


def save_plots(directory: str, point: Point, evidence: Evidence) -> None:
    """Write six PNGs into the directory."""
    plots = {
        "speedup_by_acceptance": _heat_map,
        "speedup_by_gpus": _by_gpus,
        "round_cost": _round_cost,
        "round_parts": _round_parts,
        "live_batch": _live_batch,
        "break_even": _break_even,
    }
    for name, draw in plots.items():
        if name == "round_parts" and (point.hardware == MEASURED or point.draft == "block"):
            continue  # measured rounds have no parts; the parts of a block draft are not told apart
        with figure(Path(directory) / f"{name}.png") as axes:
            draw(axes, point, evidence)


def _heat_map(axes: Any, point: Point, evidence: Evidence) -> None:
    """Draw the step's speed-up by draft length and acceptance of position 1."""
    rates = np.linspace(0.4, 0.95, 12)
    plain = run(resolve_pair(replace(point, draft_length=0, draft_lengths=()), evidence)[0], evidence).step
    table = np.zeros((len(rates), len(DRAFT_LENGTHS)))
    for column, k in enumerate(DRAFT_LENGTHS):
        for row, rate in enumerate(rates):
            length = float(acceptance_length(rate, k))
            tried = replace(point, draft_length=k, draft_lengths=(), acceptance_length=length, measured_at=k)
            table[row, column] = plain / run(resolve_pair(tried, evidence)[1], evidence).step
    most = max(abs(np.log(table)).max(), 0.05)
    image = axes.pcolormesh(DRAFT_LENGTHS, rates, np.log(table), cmap="RdBu", vmin=-most, vmax=most, shading="nearest")
    for column, k in enumerate(DRAFT_LENGTHS):
        for row, rate in enumerate(rates):
            axes.text(k, rate, f"{table[row, column]:.2f}", ha="center", va="center", fontsize="x-small")
    axes.figure.colorbar(image, label="log of the step's speed-up")
    axes.set_xlabel("draft length")
    axes.set_ylabel("acceptance of position 1")


def _by_gpus(axes: Any, point: Point, evidence: Evidence) -> None:
    """Draw the step's speed-up by the number of GPUs, for each lag, with intervals."""
    unit = max(point.tensor, point.expert)
    counts = [unit * 2**i for i in range(12) if point.gpus / 8 <= unit * 2**i <= point.gpus * 8]
    for lag in LAGS:
        curve: list[tuple[int, Interval]] = []
        for count in counts:
            try:
                tried = point.changed({"gpus": count, "lag": lag, "generation_gpus": 0})
                pair = resolve_pair(tried, evidence)
            except ValueError:  # it does not fit
                continue
            found = estimate({}, pair, evidence, input_ranges(tried, evidence, {}), SAMPLES)
            assert found.intervals is not None
            curve.append((count, found.intervals["step_speedup"]))
        values = np.array([each for _, each in curve]).reshape(-1, 3)
        (line,) = axes.plot([count for count, _ in curve], values[:, 0], marker="o", label=f"lag {lag}")
        axes.fill_between([count for count, _ in curve], values[:, 1], values[:, 2], alpha=0.15, color=line.get_color())
    axes.set_xscale("log", base=2)
    axes.axhline(1.0, color="grey", linewidth=1)
    label(axes, "GPUs", "speed-up of a step")


def _round_cost(axes: Any, point: Point, evidence: Evidence) -> None:
    """Draw the seconds of a round over those without drafts, by rows."""
    for k, costs in _relative_costs(point, evidence).items():
        axes.plot(ROWS, costs, marker=".", label=f"k = {k}")
    axes.set_xscale("log", base=2)
    label(axes, "rows decoded together", "seconds of a round / without drafts")


def _round_parts(axes: Any, point: Point, evidence: Evidence) -> None:
    """Draw what a round consists of, by rows."""
    k = max(point.lengths)
    parts = sheet_model(point).parts(ROWS, _positions(point), k)
    axes.stackplot(ROWS, [1e3 * np.broadcast_to(part, ROWS.shape) for part in parts.values()], labels=list(parts))
    axes.set_xscale("log", base=2)
    label(axes, "rows decoded together", f"milliseconds of a round, k = {k}")


def _live_batch(axes: Any, point: Point, evidence: Evidence) -> None:
    """Draw the live rows of a replica over time, and the draft length that is best at each moment."""
    automatic = replace(point, draft_lengths=(0, *DRAFT_LENGTHS), draft_length=0)
    timeline = run(resolve_pair(automatic, evidence)[1], evidence).timeline
    seconds = [moment.seconds for moment in timeline]
    axes.step(seconds, [moment.live for moment in timeline], where="post", label="live rows")
    other = axes.twinx()
    lengths = [moment.draft_length for moment in timeline]
    other.step(seconds, lengths, where="post", color="tab:orange", label="draft length")
    other.set_ylabel("draft length chosen")
    label(axes, "seconds", "live rows of a replica")


def _break_even(axes: Any, point: Point, evidence: Evidence) -> None:
    """Draw the acceptance of position 1 at which a round with drafts is as fast as the rounds it replaces."""
    for k, costs in _relative_costs(point, evidence).items():
        most = float(acceptance_length(1.0, k))
        rates = [first_rate(max(cost, 1.0), k) if cost <= most else np.nan for cost in costs]
        axes.plot(ROWS, rates, marker=".", label=f"k = {k}")
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1.02)
    label(axes, "rows decoded together", "break-even acceptance of position 1")


def _relative_costs(point: Point, evidence: Evidence) -> dict[int, np.ndarray]:
    """Return the seconds of a round with drafts over one without, by draft length, for each of ROWS."""
    costs, positions = round_costs(point, evidence), _positions(point)
    return {k: np.array(costs(ROWS, positions, k) / costs(ROWS, positions, 0)) for k in (1, 3, 5, 7)}


def _positions(point: Point) -> np.ndarray:
    return ROWS * (point.prompt_tokens + point.mean_tokens / 2)

"""Plots of benchmarks.draft_findings."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.draft_runs import MODES, DraftedRollouts, DraftRun, Position
from benchmarks.plotting import figure, label

# RL steps per point of a curve, which shows their mean.
SMOOTHING = 25
COLOURS = {"in-domain": "C0", "generic": "C1", "random": "C2"}
# Line style of each mode.
STYLES = ("--", "-", "-.", ":", (0, (1, 4)))


def save_plots(
    directory: Path,
    timings: Sequence[DraftedRollouts],
    runs: Sequence[DraftRun],
    rates: Mapping[str, Sequence[Position]],
) -> None:
    """Draw draft_length.png, adaptation.png and passes.png."""
    directory.mkdir(parents=True, exist_ok=True)
    with figure(directory / "draft_length.png", (9, 3.8), columns=2) as (above, below):
        for start, colour in COLOURS.items():
            rows = [row for row in timings if row.start == start]
            lengths, speedups = [row.draft_length for row in rows], np.array([row.speedup for row in rows])
            above.plot(lengths, [row.alpha for row in rows], marker="o", color=colour, label=start)
            below.plot(lengths, speedups[:, 0], marker="o", color=colour, label=start)
            below.fill_between(lengths, speedups[:, 1], speedups[:, 2], color=colour, alpha=0.2)
        below.axhline(1.0, color="grey", linewidth=1)
        label(above, "draft length", "acceptance length")
        label(below, "draft length", "speed-up over draft length 0")

    with figure(directory / "adaptation.png", (7, 5)) as axes:
        for run in runs:
            curve = np.convolve(run.alpha, np.full(SMOOTHING, 1 / SMOOTHING), "valid")
            style, name = STYLES[list(MODES).index(run.mode)], f"{run.start}, {run.mode}"
            axes.plot(np.arange(len(curve)) + SMOOTHING, curve, linestyle=style, color=COLOURS[run.start], label=name)
        axes.set_xlabel(f"step of RL (means of {SMOOTHING})")
        axes.set_ylabel("acceptance length")
        # Below the axes, because the curves leave no room for a legend.
        axes.figure.legend(loc="outside lower center", ncols=3, fontsize="small")

    with figure(directory / "passes.png", (5, 3.8)) as axes:
        for name, positions in rates.items():
            at, errors = np.arange(len(positions)) + 1, [2 * position.error for position in positions]
            axes.errorbar(at, [position.rate for position in positions], errors, marker="o", capsize=3, label=name)
            axes.set_xticks(at)
        label(axes, "position in the draft", "accepted, of what was drafted there")

"""Seconds of rounds from those that a run measured."""

from collections.abc import Sequence

import numpy as np

from benchmarks.simulation.surface import RoundSeconds
from specjax.cost import Cell, corrected, fit
from specjax.rollout.plan import Phase
from specjax.types import Mixture


def measured_rounds(
    cells: Sequence[Cell], phases: Sequence[Phase], mixture: Mixture | None, longest: int
) -> RoundSeconds:
    """Return the seconds of a round by rows, positions and draft length, on the machine that measured `cells`.

    A round that was measured takes what was measured, by `specjax.cost.corrected`, the rule of the automatic draft
    length. Any other takes the model fitted to the cells, times the ratio of the measured shape that is nearest.

    phases:  of the run. Attention reads the smallest window of the phase that holds the rows.
    mixture: the policy's experts.
    longest: most positions of a row.
    """
    model, shapes = fit(cells, mixture), sorted({Phase(cell.slots, cell.window) for cell in cells})
    slots, windows = (np.array(each, np.float64) for each in zip(*shapes, strict=True))
    sizes = np.array(sorted({phase.slots for phase in phases}) or [1])

    def window(rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        phase_of = sizes[np.minimum(np.searchsorted(sizes, rows), len(sizes) - 1)]
        widths = np.full(np.broadcast_shapes(rows.shape, positions.shape), float(longest))
        for phase in sorted(phases, key=lambda phase: -phase.window):
            inside = (phase_of == phase.slots) & (positions <= rows * phase.window)
            widths = np.where(inside, min(phase.window, longest), widths)
        return widths

    def seconds(rows: np.ndarray, positions: np.ndarray, k: int) -> np.ndarray:
        modelled = np.array([float(model.seconds(shape.slots, shape.slots * shape.window, k)) for shape in shapes])
        ratios = corrected(model, cells, shapes, (k,))[:, 0] / np.maximum(modelled, 1e-12)
        width = window(rows, positions)
        distance = np.abs(np.log(rows[..., None] / slots)) + np.abs(np.log(width[..., None] / windows))
        return ratios[distance.argmin(-1)] * model.seconds(rows, rows * width, k)

    return seconds

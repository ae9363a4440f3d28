"""Cost models fitted to measured rounds."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.optimize import nnls

from specjax.cost.forward import ExpertCounts, Forward
from specjax.cost.model import CostModel
from specjax.rollout.plan import Phase
from specjax.types import Mixture


class Cell(NamedTuple):
    """A measured round: `slots` rows of `window` positions at a draft length, in seconds.

    step: the training step before which it was measured; 0 at the start.
    """

    slots: int
    window: int
    draft_length: int
    seconds: float
    step: int = 0


def fit(cells: Sequence[Cell], mixture: Mixture | None = None) -> CostModel:
    """Return the cost model with the least squared relative error over at least two cells. Constants are not negative.

    Few cells tell few constants apart. So reading and computing are added up, the vocabulary head counts with the other
    weights, and a draft pass has a constant part and one per row.

    mixture: the policy's.
    """
    seconds = np.array([cell.seconds for cell in cells])
    experts = mixture and ExpertCounts(mixture.experts, mixture.active)
    table = np.array([_quantities(cell, experts) for cell in cells]) / seconds[:, None]
    # Columns of like size: otherwise nnls takes small ones for zero.
    scale = np.maximum(np.abs(table).max(axis=0), 1e-300)
    constants = nnls(table / scale, np.ones(len(cells)))[0] / scale
    fixed, product, cached, attended, drafting, draft_pass, drafted, expert = constants.tolist()
    return CostModel(
        Forward(fixed, product=product, cached=cached, attended=attended, expert=expert, experts=experts),
        Forward(drafting + draft_pass, sample=drafted),
        Forward(draft_pass, sample=drafted),
    )


def relative_errors(model: CostModel, cells: Sequence[Cell]) -> Float[np.ndarray, "cells"]:
    """Return modelled over measured seconds of each cell, minus 1."""
    modelled = [model.seconds(slots, slots * window, k) for slots, window, k, *_ in cells]
    return np.array(modelled) / [cell.seconds for cell in cells] - 1


def _quantities(cell: Cell, experts: ExpertCounts | None) -> tuple[float, ...]:
    """Return what each constant of `fit` is multiplied by in a round."""
    slots, k = cell.slots, cell.draft_length
    positions = float(slots * cell.window)
    policy = 1.0, slots * (k + 1.0), positions, positions * (k + 1)
    touched = 0.0 if experts is None else float(experts.touched(slots, k + 1))
    return *policy, float(k > 0), float(k), float(slots * k), touched


def round_seconds(
    cells: Sequence[Cell], phases: Sequence[Phase], draft_lengths: Sequence[int], mixture: Mixture | None = None
) -> Float[np.ndarray, "phases lengths"]:
    """Return the seconds of a round of each phase at each draft length: `corrected`, of the model fitted to the cells.

    mixture: the policy's.
    """
    return corrected(fit(cells, mixture), cells, phases, draft_lengths)


def corrected(
    model: CostModel, cells: Sequence[Cell], phases: Sequence[Phase], draft_lengths: Sequence[int]
) -> Float[np.ndarray, "phases lengths"]:
    """Return the seconds of a round of each phase at each draft length, float32, from a model and measured rounds.

    Where that round was measured, the median. Elsewhere the model, times the mean ratio of measured to modelled seconds
    in the same phase. Without this correction, a model error that all lengths of a phase share would favour the
    unmeasured lengths or the measured ones.
    """
    table = []
    for phase in phases:
        positions = phase.slots * phase.window
        modelled = np.array([float(model.seconds(phase.slots, positions, k)) for k in draft_lengths])
        samples = [[float(cell.seconds) for cell in cells if cell[:3] == (*phase, k)] for k in draft_lengths]
        measured = np.array([statistics.median(values) if values else np.nan for values in samples])
        known = ~np.isnan(measured) & (modelled > 0)
        ratio = float(np.mean(measured[known] / modelled[known])) if known.any() else 1.0
        table.append(np.where(np.isnan(measured), ratio * modelled, measured))
    return np.array(table, np.float32)

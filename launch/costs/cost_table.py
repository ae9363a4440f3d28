"""Cost table: measured and fitted seconds per round for every phase of a run; can be saved and reused."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from launch.build.experiment import Experiment
from launch.build.networks import Networks
from launch.cli.errors import ConfigError
from launch.costs.round_timer import RoundTimer, TimedRounds
from launch.timing import interleaved
from models.files import write_atomically
from specjax.cost import Cell, Drafting, fit, round_seconds
from specjax.rollout.generate import make_prepare
from specjax.rollout.plan import Phase, RolloutConfig
from specjax.types import Params, Prompts, TrainState

COST_TABLE = "cost_table.json"
REPEATS = 5
# Rounds in one measurement: those of a rollout at this many tokens per round, and no more than this.
TOKENS_PER_ROUND, MOST_ROUNDS = 2, 64


class CostTable:
    """The measured rounds ("cells") of a run, written to `path`, and the seconds per round that follow from them.

    Cells are measured at the start and before every probe. A cell counts from its own step on and is never measured
    twice, so that a resumed run, or one that replays another run's cells, chooses the same draft lengths.
    """

    def __init__(self, experiment: Experiment, path: Path, cells: Sequence[Cell], replayed: bool) -> None:
        """cells: already known. replayed: measure no others."""
        self.cells = list(cells)
        self._path, self._phases, self._lengths = path, experiment.phases, experiment.config.rollout.lengths
        self._timer = None if replayed else cell_timer(experiment)

    def resume(self, cells: Sequence[Cell], step: int) -> None:
        """Continue from a checkpoint of `step` with its cells, and with those that the run measured later."""
        later = read_cells(self._path) if self._path.exists() else []
        self.cells = [*cells, *(cell for cell in later if cell.step > step and cell not in cells)]

    def changes(self, step: int, probing: bool) -> bool:
        """Return whether new cells take effect at this step."""
        return self._known(step) or (probing and self._timer is not None)

    def update(self, params: Params, step: int) -> np.ndarray:
        """Return the seconds of a round from `step` on, float32 [phases, draft_lengths]. Measures and saves cells."""
        if self._timer is not None and not self._known(step):
            self.cells += self._timer.measure(params, step)
        known = [cell for cell in self.cells if cell.step <= step]
        table = {"cells": [cell._asdict() for cell in self.cells], "model": fit(known)._asdict()}
        write_atomically(self._path, json.dumps(table, indent=2) + "\n")
        return round_seconds(known, self._phases, self._lengths)

    def refresh(self, state: TrainState, step: int) -> Drafting:
        """Return the state's `drafting` with the seconds from `step` on."""
        assert state.drafting is not None
        seconds = jax.device_put(self.update(state.params, step), state.drafting.seconds.sharding)
        return replace(state.drafting, seconds=seconds)

    def _known(self, step: int) -> bool:
        return any(cell.step == step for cell in self.cells)


class CellTimer:
    """Times a round at every draft length in the last phase, and at the shortest and longest in other shapes.

    The shapes are those of the other phases. `fit_others` adds a quarter of the slots and half of the window: with a
    single phase, the fitted model could not tell weights, rows and positions apart, and other runs could not use it.
    """

    def __init__(
        self,
        networks: Networks,
        rollout: RolloutConfig,
        phases: Sequence[Phase],
        prompts: Prompts,
        mesh: Mesh,
        fit_others: bool = True,
    ) -> None:
        lengths, last, shapes = rollout.lengths, phases[-1], {*phases}
        if fit_others:
            shapes |= {Phase(-(-last.slots // 4), last.window), Phase(last.slots, -(-last.window // 2))}
        shapes = {shape for shape in shapes if shape.window >= prompts.tokens.shape[1]}
        cells = {(shape, k) for shape in shapes for k in (lengths[0], lengths[-1])} | {(last, k) for k in lengths}
        kinds = {cell: TimedRounds(*cell) for cell in sorted(cells)}
        count = min(-(-rollout.max_new_tokens // TOKENS_PER_ROUND), MOST_ROUNDS)
        self._networks, self._mesh = networks, mesh
        self._timer = RoundTimer(networks.policy, networks.drafter, rollout, prompts, mesh, kinds, count)
        self._prepare: Callable[[Params], Params] | None = None

    def measure(self, params: Params, step: int) -> list[Cell]:
        """Measure all cells and mark them with `step`."""
        if self._prepare is None:
            self._prepare = make_prepare(params, self._networks.policy.dtype)
        with jax.set_mesh(self._mesh):
            prepared = self._prepare(params)
        measured = interleaved(self._timer.start(prepared), REPEATS)
        # Take the minimum: disturbances only add time.
        return [Cell(*phase, k, min(seconds), step) for (phase, k), seconds in measured.items()]


def cell_timer(experiment: Experiment, fit_others: bool = True) -> CellTimer:
    """Return the timer for a run's rounds, on its first training prompts."""
    prompts = experiment.train_prompts.batch(np.arange(experiment.config.data.prompts))
    return CellTimer(
        experiment.networks, experiment.config.rollout, experiment.phases, prompts, experiment.mesh, fit_others
    )


def load_cells(path: Path, phases: Sequence[Phase], draft_lengths: Sequence[int]) -> list[Cell]:
    """Read the cost table of another run.

    Raises ConfigError unless its cells of step 0 give every round of these phases and draft lengths a cost.
    """
    cells = read_cells(path)
    start_cells = [cell for cell in cells if cell.step == 0]
    if len({cell[:3] for cell in start_cells}) < 2:
        raise ConfigError(
            f"cost_table = {path}: {len(start_cells)} cells of step 0; must hold at least two different rounds"
        )
    seconds = round_seconds(start_cells, phases, draft_lengths)
    for phase, k in zip(*np.nonzero(seconds <= 0), strict=True):
        slots, window = phases[phase]
        raise ConfigError(
            f"cost_table = {path}: its cells give a round of {slots} slots of {window} positions at draft length "
            f"{draft_lengths[k]} no cost above 0; must hold rounds of similar size"
        )
    return cells


def read_cells(path: Path) -> list[Cell]:
    """Read the cells of a cost table. Raises ConfigError if the file or a cell is malformed."""
    try:
        cells = [Cell(**cell) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cost_table = {path}: not a cost table: {error}") from None
    for cell in cells:
        for name, least in {"slots": 1, "window": 1, "draft_length": 0, "step": 0}.items():
            value = getattr(cell, name)
            if type(value) is not int or value < least:
                raise ConfigError(f"cost_table = {path}: {name} = {value!r}: must be an integer of at least {least}")
        if type(cell.seconds) not in (int, float) or not 0 < cell.seconds < math.inf:
            raise ConfigError(f"cost_table = {path}: seconds = {cell.seconds!r}: must be > 0 and finite")
    return cells

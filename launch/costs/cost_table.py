"""Cost table: measured and fitted seconds per round for every phase of a run. It can be saved and reused."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from launch.costs.round_timer import RoundTimer, TimedRounds
from launch.costs.turns import timed_turns
from launch.errors import ConfigError
from launch.phases.long_phases import long_phase
from launch.setup.experiment import Experiment
from launch.setup.networks import Networks
from models.files import read_json, write_atomically
from specjax.adapters import joined
from specjax.asynchronous.weight_transfer import Send
from specjax.cost import Cell, Drafting, could_pay, fit, round_seconds, unmeasured
from specjax.parallel import processes
from specjax.program import finish_compiling
from specjax.rollout.generate import copy_on, make_prepare, prepare
from specjax.rollout.plan import Phase, RolloutConfig
from specjax.train.draft.schedule import unused_draft_is_due
from specjax.types import Mixture, Params, Prompts, TrainState

COST_TABLE = "cost_table.json"
REPEATS = 5  # measurements of each cell
# One measurement runs as many rounds as a rollout would need at TOKENS_PER_ROUND, at most MOST_ROUNDS.
TOKENS_PER_ROUND, MOST_ROUNDS = 2, 64


class CostTable:
    """Measured rounds ("cells") of a run, saved to a file, and the seconds per round that follow from them.

    Cells are measured once drafts may pay, or at the start of a run, and from then on before every probe. A cell counts
    from its step on. A step is measured only once, so that a resumed run, or one that replays the cells of another,
    chooses the same draft lengths.

    Attributes:
        cells: known cells.
        used:  whether draft lengths are chosen by cells. Until then all are 0.
    """

    def __init__(self, experiment: Experiment, path: Path, cells: Sequence[Cell], replayed: bool) -> None:
        """Open the table.

        Args:
            path:     file that `update` writes.
            cells:    cells that are known already.
            replayed: use only these cells and measure none.
        """
        self.cells, self.used = list(cells), False
        self._path, self._phases, self._lengths = path, experiment.phases, experiment.config.rollout.lengths
        self._mixture, self._schedule = experiment.networks.policy.mixture, experiment.config.draft_training
        self._trains = experiment.networks.draft.has_params
        self._timer = None if replayed else cell_timer(experiment)

    def resume(self, cells: Sequence[Cell], step: int, drafting: Drafting) -> None:
        """Restore the cells of a checkpoint of `step`, and add those in the file that the run measured later.

        drafting: of the checkpoint's state.
        """
        in_file = processes.on_primary(
            lambda: [cell._asdict() for cell in (read_cells(self._path) if self._path.exists() else [])]
        )
        self.used = bool(np.isfinite(processes.fetch(drafting.seconds)).all())
        later = [cell for cell in (Cell(**fields) for fields in in_file) if cell.step > step]
        self.cells = [*cells, *(cell for cell in later if cell not in cells)]

    def start(self, params: Params, later: bool) -> np.ndarray:
        """Return the seconds per round at step 1. later: `unmeasured` ones. Raises Stopped at a signal."""
        if not later:
            return self.update(params, 0)
        if self._timer is not None:
            # A killed attempt may have left a file without a checkpoint.
            processes.on_primary(lambda: self._path.unlink(missing_ok=True))
        return unmeasured(len(self._phases), self._lengths)

    def changes(self, step: int, probing: bool, drafting: Drafting) -> bool:
        """Return True if new cells take effect at `step`.

        The first are measured once `could_pay` holds. A draft with parameters is looked at after steps that trained it
        unused, because reading `drafting` waits for the step before; a lookup after every step.

        probing: the run probes at this step.
        """
        if self.cells and step < min(cell.step for cell in self.cells):
            # A resumed run knows cells that the run before measured later.
            return False
        if self._timer is None or self.cells:
            return self.has_cells(step) or (probing and self._timer is not None)
        if self._trains and not unused_draft_is_due(self._schedule, step - 1):
            return False
        return processes.agree(bool(could_pay(processes.fetch(drafting), self._lengths)))

    def update(self, params: Params, step: int) -> np.ndarray:
        """Return the seconds per round from `step` on, float32 [phases, draft lengths].

        First measures the cells of `step`, unless they are known or the table is replayed, and writes the file. Before
        the first step of a run, it raises Stopped at a signal.
        """
        if self._timer is not None and not self.has_cells(step):
            self.cells += self._timer.measure(params, step)
        self.used = True
        # Another run may have measured its first cells later.
        first = min(cell.step for cell in self.cells)
        effective = [cell for cell in self.cells if cell.step <= max(step, first)]
        table = {"cells": [cell._asdict() for cell in self.cells], "model": fit(effective, self._mixture).constants()}
        write_atomically(self._path, json.dumps(table, indent=2) + "\n")
        return round_seconds(effective, self._phases, self._lengths, self._mixture)

    def refresh(self, state: TrainState, step: int) -> Drafting:
        """Return `state.drafting` with the seconds per round from `step` on."""
        assert state.drafting is not None
        seconds = processes.place(self.update(state.params, step), state.drafting.seconds.sharding)
        return replace(state.drafting, seconds=seconds)

    def has_cells(self, step: int) -> bool:
        """Return whether cells of exactly this step are known."""
        return any(cell.step == step for cell in self.cells)


class CellTimer:
    """Timer of the rounds to which the cost model of a run is fitted.

    It times every draft length in the last phase, and the shortest and longest one in every other shape. The other
    shapes are the other phases and, with `fit_others`, the last phase with a quarter of its slots or half of its
    window. From a single phase, the fit could not separate the costs of weights, rows and positions, and other runs
    could not use the table. Shapes whose window is too short for the prompts are left out.
    """

    def __init__(
        self,
        networks: Networks,
        rollout: RolloutConfig,
        phases: Sequence[Phase],
        prompts: Prompts,
        mesh: Mesh,
        fit_others: bool = True,
        trained_on: Mesh | None = None,
    ) -> None:
        lengths, last, shapes = rollout.lengths, phases[-1], {*phases}
        if fit_others:
            shapes |= {Phase(-(-last.slots // 4), last.window), Phase(last.slots, -(-last.window // 2))}
        shapes = {shape for shape in shapes if shape.window >= prompts.tokens.shape[1]}
        pairs = {(shape, k) for shape in shapes for k in (lengths[0], lengths[-1])} | {(last, k) for k in lengths}
        kinds = {pair: TimedRounds(*pair) for pair in sorted(pairs)}
        num_rounds = min(-(-rollout.max_new_tokens // TOKENS_PER_ROUND), MOST_ROUNDS)
        self._networks, self._mesh, self._trained_on = networks, mesh, trained_on or mesh
        self._timer = RoundTimer(networks.policy, networks.drafter, rollout, prompts, mesh, kinds, num_rounds)
        self._prepare: Callable[[Params], Params] | None = None

    def measure(self, params: Params, step: int) -> list[Cell]:
        """Measure and return all cells, with `step` as their step. params: as trained, not prepared.

        Raises Stopped at a signal.
        """
        if self._prepare is None:
            self._prepare = self._make_prepare(params)
        with jax.set_mesh(self._mesh):
            prepared = self._prepare(params)
        measured = processes.within(self._mesh, partial(self._measure, prepared, step))
        return [Cell(**fields) for fields in measured]

    def _measure(self, prepared: Params, step: int) -> list[dict[str, Any]]:
        with long_phase("compiling of rounds to time", 1, "set of programs", kept=False, quiet=True) as phase:
            timed = self._timer.start(prepared)
            finish_compiling()
            phase.finish()
        runs = {f"{k} at {rows}": lambda _, run=run: run() for (rows, k), run in timed.items()}
        turns = timed_turns(long_phase("costs of rounds", REPEATS, "turns", kept=False, quiet=True), runs)
        # Take the minimum: interference from other processes only adds time.
        seconds = (min(turn[name] for turn in turns) for name in runs)
        return [Cell(*rows, k, least, step)._asdict() for (rows, k), least in zip(timed, seconds, strict=True)]

    def _make_prepare(self, params: Params) -> Callable[[Params], Params]:
        networks = self._networks.policy, self._networks.drafter
        if self._trained_on is self._mesh:
            return make_prepare(*networks, params)
        layout = jax.tree.map(lambda x: x.sharding, joined(copy_on(self._mesh, *networks, params)))
        return Send(partial(prepare, *networks), layout, self._trained_on, self._mesh)


def cell_timer(experiment: Experiment, fit_others: bool = True) -> CellTimer:
    """Return the timer of the cells of a run. It decodes the first batch of training prompts.

    Raises ConfigError if there are too few prompts for a batch.
    """
    prompts = next(experiment.train_batches())
    return CellTimer(
        *(experiment.networks, experiment.config.rollout, experiment.phases, prompts, experiment.rollout_mesh),
        fit_others=fit_others,
        trained_on=experiment.mesh,
    )


def given_cells(experiment: Experiment) -> list[Cell]:
    """Read the cells of the run's `cost_table`; none without one. Raises ConfigError as `load_cells`."""
    path = experiment.config.cost_table
    rounds = experiment.phases, experiment.config.rollout.lengths
    return [] if path is None else load_cells(Path(path), *rounds, experiment.networks.policy.mixture)


def load_cells(
    path: Path, phases: Sequence[Phase], draft_lengths: Sequence[int], mixture: Mixture | None = None
) -> list[Cell]:
    """Read the cells of another run, for a run with these phases and draft lengths and this mixture of experts.

    Raises ConfigError unless its cells of the first step hold at least two different rounds and the model fitted to
    them gives every round of this run a cost above 0.
    """
    cells = read_cells(path)
    first = min((cell.step for cell in cells), default=0)
    start_cells = [cell for cell in cells if cell.step == first]
    if len({cell[:3] for cell in start_cells}) < 2:
        raise ConfigError(
            f"cost_table = {path}: {len(start_cells)} cells of step {first}; must hold at least two different rounds"
        )
    seconds = round_seconds(start_cells, phases, draft_lengths, mixture)
    # The fit rounds: what should be 0 may be 1e-16.
    for phase, k in zip(*np.nonzero(seconds <= 1e-9 * np.max(seconds)), strict=True):
        slots, window = phases[phase]
        raise ConfigError(
            f"cost_table = {path}: its cells give a round of {slots} slots of {window} positions at draft length "
            f"{draft_lengths[k]} no cost above 0; must hold rounds of similar size"
        )
    return cells


def read_cells(path: Path) -> list[Cell]:
    """Read the cells of a cost table. Raises ConfigError if the file or a cell is malformed."""
    try:
        cells = [Cell(**cell) for cell in read_json(path)["cells"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cost_table = {path}: not a cost table: {error}") from None
    for cell in cells:
        for name, minimum in {"slots": 1, "window": 1, "draft_length": 0, "step": 0}.items():
            value = getattr(cell, name)
            if type(value) is not int or value < minimum:
                raise ConfigError(f"cost_table = {path}: {name} = {value!r}: must be an integer of at least {minimum}")
        if type(cell.seconds) not in (int, float) or not 0 < cell.seconds < math.inf:
            raise ConfigError(f"cost_table = {path}: seconds = {cell.seconds!r}: must be > 0 and finite")
    return cells

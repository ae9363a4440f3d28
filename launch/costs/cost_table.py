"""The seconds that a round takes on this machine, in the phases of a run: measured, fitted, written down, reused."""

import json
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from launch.build.experiment import Experiment
from launch.build.networks import Networks
from launch.cli.errors import ConfigError
from launch.timing import in_turns, seconds, without_start
from models.files import write_atomically
from specjax import cache as kv
from specjax.cost import Cell, Drafting, fit, round_seconds
from specjax.keys import seed_step
from specjax.parallel.mesh import BATCH_AXES, batch_shards, decoding_options
from specjax.rollout.generate import place, prepare
from specjax.rollout.plan import Phase, RolloutConfig
from specjax.rollout.rounds import Decoding, RoundState, rounds
from specjax.rollout.speculative import begin
from specjax.types import Params, Prompts, TrainState

COST_TABLE = "cost_table.json"
REPEATS = 5
# Tokens of a round, and the most rounds, that a rollout is taken to have: what it takes to begin is spread over them.
TOKENS, MOST_ROUNDS = 2, 64


class CostTable:
    """What rounds cost, measured at the start of a run and again at its probes, and by a model fitted to all of it.

    Every cell counts from its own step on, and none is measured that is known: a run that is resumed, or replays the
    cells of another one, sees at each step what that run saw.
    """

    def __init__(self, experiment: Experiment, path: Path, cells: Sequence[Cell], replayed: bool) -> None:
        """Of the cells given, kept at `path` for people and for other runs. Nothing is measured if `replayed`."""
        self.cells = list(cells)
        self._path, self._phases, self._lengths = path, experiment.phases, experiment.train.rollout.lengths
        prompts = experiment.train_prompts.batch(np.arange(experiment.config.data.prompts))
        parts = experiment.networks, experiment.train.rollout, experiment.phases, prompts, experiment.mesh
        self._clock = None if replayed else RoundClock(*parts)

    def resume(self, cells: Sequence[Cell], step: int) -> None:
        """Take up the cells of a save made behind `step`, and those that its run went on to measure."""
        later = read_cells(self._path) if self._path.exists() else []
        self.cells = [*cells, *(cell for cell in later if cell.step > step and cell not in cells)]

    def due(self, step: int, probing: bool) -> bool:
        """Whether what rounds cost is known anew before this step."""
        return self._known(step) or (probing and self._clock is not None)

    def update(self, params: Params, step: int) -> np.ndarray:
        """float32 [phases, draft_lengths], the seconds of a round from `step` on."""
        if self._clock is not None and not self._known(step):
            self.cells += self._clock.measure(params, step)
        known = [cell for cell in self.cells if cell.step <= step]
        kept = {"cells": [cell._asdict() for cell in self.cells], "model": fit(known)._asdict()}
        write_atomically(self._path, json.dumps(kept, indent=2) + "\n")
        return round_seconds(known, self._phases, self._lengths)

    def refresh(self, state: TrainState, step: int) -> Drafting:
        """What draft lengths are chosen by, with the seconds from `step` on."""
        assert state.drafting is not None
        table = jax.device_put(self.update(state.params, step), state.drafting.seconds.sharding)
        return replace(state.drafting, seconds=table)

    def _known(self, step: int) -> bool:
        return any(cell.step == step for cell in self.cells)


class RoundClock:
    """Times rounds at every draft length in the last phase; where slots or window differ, at the shortest and longest.

    Those are the other phases, and with `beyond` a quarter of the slots and half of the window, without which a single
    phase would not tell other runs what weights, rows and positions cost. Programs are compiled on first use.
    """

    def __init__(
        self,
        networks: Networks,
        rollout: RolloutConfig,
        phases: Sequence[Phase],
        prompts: Prompts,
        mesh: Mesh,
        beyond: bool = True,
    ) -> None:
        lengths, last = rollout.lengths, phases[-1]
        shapes = {*phases}
        if beyond:
            shapes |= {Phase(-(-last.slots // 4), last.window), Phase(last.slots, -(-last.window // 2))}
        shapes = {shape for shape in shapes if shape.window >= prompts.tokens.shape[1]}
        wanted = {(shape, k) for shape in shapes for k in (lengths[0], lengths[-1])} | {(last, k) for k in lengths}
        leaving = last.slots < len(prompts.lengths) * rollout.group_size // batch_shards(mesh)
        self._mesh, self._prompts = mesh, place(prompts, mesh)
        self._count = min(-(-rollout.max_new_tokens // TOKENS), MOST_ROUNDS)
        self._begun = {shape: _begun(networks, rollout, mesh, shape, leaving) for shape in shapes}
        self._rounds = {(shape, k): _rounds(networks, rollout, mesh, k) for shape, k in sorted(wanted)}
        self._compiled: dict[tuple[Phase, int], jax.stages.Compiled] = {}

    def measure(self, params: Params, step: int) -> list[Cell]:
        """The cells of now, `step`."""
        with jax.set_mesh(self._mesh):
            if not self._compiled:
                self._compile(params)
            runs = {
                (cell, count): partial(self._seconds, cell, params, count)
                for cell in self._rounds
                for count in (0, self._count)
            }
            for run in runs.values():
                run()
            # The least, since what disturbs a round only adds to it.
            least = {name: min(values) for name, values in in_turns(runs, REPEATS).items()}

        def net(phase: Phase, k: int) -> float:
            # Without what any length takes to begin. What one takes beyond that, kernels laid out for the products of
            # its rounds, is theirs.
            start = min(seconds for ((other, _), count), seconds in least.items() if other == phase and not count)
            return without_start(least[(phase, k), self._count], start) / self._count

        return [Cell(*phase, k, net(phase, k), step) for phase, k in self._rounds]

    def _compile(self, params: Params) -> None:
        """Side by side: much of what a compiler does keeps but one core busy."""
        lowered = [
            run.lower(params, self._begun[shape](params, self._prompts), jnp.int32(0))
            for (shape, _), run in self._rounds.items()
        ]
        with ThreadPoolExecutor() as pool:
            compiled = pool.map(jax.stages.Lowered.compile, lowered)
            self._compiled = dict(zip(self._rounds, compiled, strict=True))

    def _seconds(self, cell: tuple[Phase, int], params: Params, count: int) -> float:
        """Of so many rounds from where the first rows begin, run on all shards at once, and of preparing for them."""
        state = self._begun[cell[0]](params, self._prompts)
        state, number = jax.block_until_ready((state, jnp.int32(count)))
        return seconds(partial(self._compiled[cell], params, state, number))


def _begun(
    networks: Networks, config: RolloutConfig, mesh: Mesh, phase: Phase, leaving: bool
) -> Callable[[Params, Prompts], RoundState]:
    """The first rows of this phase on each shard, with room for the longest draft."""
    config = replace(config, draft_lengths=(), draft_length=max(config.lengths))

    def first(params: Params, prompts: Prompts) -> RoundState:
        noise, by = seed_step(0, -3), prompts.tokens.shape[1] + config.max_new_tokens - phase.window
        decoding = Decoding(networks.policy, networks.drafter, params, config)
        return kv.resize(begin(decoding, prompts, noise, phase.slots, leaving=leaving).state, -by)

    program = _on_each_shard(first, networks, mesh, P(BATCH_AXES))
    return jax.jit(program, compiler_options=decoding_options(networks.policy.dtype))


def _rounds(networks: Networks, config: RolloutConfig, mesh: Mesh, k: int) -> jax.stages.Wrapped:
    """So many rounds, whose cost does not hang on which rows are still at work, nor on what is in them."""
    config = replace(config, draft_lengths=(), draft_length=max(config.lengths))

    def some(params: Params, state: RoundState, count: Int[Array, ""]) -> RoundState:
        decoding = Decoding(networks.policy, networks.drafter, params, config)
        return rounds(decoding, state, k, lambda _, trips: trips == count)[0]

    # Donated, as a loop's own state is: what is timed copies no cache.
    program = _on_each_shard(some, networks, mesh, P(BATCH_AXES), P())
    return jax.jit(program, donate_argnums=1, compiler_options=decoding_options(networks.policy.dtype))


def _on_each_shard(
    run: Callable[..., RoundState], networks: Networks, mesh: Mesh, *specs: P
) -> Callable[..., RoundState]:
    """`run` of prepared parameters, from those that are trained, as a step's one program has it."""
    rows, axes = P(BATCH_AXES), set(BATCH_AXES)
    sharded = jax.shard_map(run, mesh=mesh, in_specs=(P(), *specs), out_specs=rows, axis_names=axes, check_vma=False)

    def program(params: Params, *args: Any) -> RoundState:
        return sharded(prepare(params, networks.policy.dtype), *args)

    return program


def load_cells(path: Path, phases: Sequence[Phase], draft_lengths: Sequence[int]) -> list[Cell]:
    """The cells of a table that another run kept.

    Raises ConfigError where there is none, or none that tells what rounds of these phases and draft lengths cost.
    """
    cells = read_cells(path)
    begin = [cell for cell in cells if cell.step == 0]
    if len({cell[:3] for cell in begin}) < 2:
        raise ConfigError(
            f"cost_table = {path}: {len(begin)} cells of step 0: must be of two different rounds at least"
        )
    seconds = round_seconds(begin, phases, draft_lengths)
    for phase, k in zip(*np.nonzero(seconds <= 0), strict=True):
        slots, window = phases[phase]
        raise ConfigError(
            f"cost_table = {path}: its cells give a round of {slots} slots of {window} positions at draft length "
            f"{draft_lengths[k]} no cost: must be of rounds more like it"
        )
    return cells


def read_cells(path: Path) -> list[Cell]:
    """The cells of a table as they are written. Raises ConfigError where there are none that could be."""
    try:
        cells = [Cell(**cell) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cost_table = {path}: no table of costs: {error}") from None
    for cell in cells:
        for name, least in {"slots": 1, "window": 1, "draft_length": 0, "step": 0}.items():
            value = getattr(cell, name)
            if type(value) is not int or value < least:
                raise ConfigError(f"cost_table = {path}: {name} = {value!r}: must be an integer of at least {least}")
        if type(cell.seconds) not in (int, float) or not 0 < cell.seconds < math.inf:
            raise ConfigError(f"cost_table = {path}: seconds = {cell.seconds!r}: must be > 0 and finite")
    return cells

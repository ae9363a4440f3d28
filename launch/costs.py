"""The seconds that a round takes on this machine, in the phases of a run: measured, fitted, written down, reused."""

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from launch.build import Networks
from launch.errors import ConfigError
from launch.measure import in_turns, seconds
from launch.run_directory import write_atomically
from launch.setup import Setup
from specjax import cache as kv
from specjax.cost import Cell, fit
from specjax.generate import place, prepare
from specjax.mesh import BATCH_AXES
from specjax.plan import Phase, RolloutConfig
from specjax.rollout import begin
from specjax.rounds import Decoding, RoundState, round_once
from specjax.types import Params, Prompts

COST_TABLE = "cost_table.json"
ROUNDS, REPEATS = 8, 5


def round_seconds(setup: Setup, params: Params, path: Path, cells: list[Cell] | None) -> np.ndarray:
    """float32 [phases, draft_lengths]: a round's, by the model fitted to the cells, which are measured where None.

    Either way they are kept at `path`, for people and for another run.
    """
    rollout, phases = setup.train.rollout, setup.phases
    if cells is None:
        prompts = setup.train_prompts.batch(np.arange(setup.config.data.prompts))
        cells = measure_cells(setup.networks, params, rollout, phases, prompts, setup.mesh)
    model = fit(cells)
    kept = {"cells": [cell._asdict() for cell in cells], "model": model._asdict()}
    write_atomically(path, json.dumps(kept, indent=2) + "\n")
    return model.table(phases, rollout.lengths)


def measure_cells(
    networks: Networks, params: Params, rollout: RolloutConfig, phases: Sequence[Phase], prompts: Prompts, mesh: Mesh
) -> list[Cell]:
    """Rounds at every draft length in the last phase, and at the shortest and the longest where slots or window differ.

    Those are the other phases, and always a quarter of the slots and half of the window, without which a single phase
    would not tell what weights, rows and positions cost.
    """
    lengths, last = rollout.lengths, phases[-1]
    shapes = {*phases, Phase(-(-last.slots // 4), last.window), Phase(last.slots, -(-last.window // 2))}
    shapes = {shape for shape in shapes if shape.window >= prompts.tokens.shape[1]}
    wanted = {(shape, k) for shape in shapes for k in (lengths[0], lengths[-1])} | {(last, k) for k in lengths}
    with jax.set_mesh(mesh):
        gathered, prompts = jax.jit(partial(prepare, policy=networks.policy))(params), place(prompts, mesh)
        runs = {
            (shape, k): partial(_rounds(networks, rollout, mesh, shape, k), gathered, prompts)
            for shape, k in sorted(wanted)
        }
        for run in runs.values():
            run()
        measured = in_turns(runs, REPEATS)
    return [Cell(*shape, k, statistics.median(values)) for (shape, k), values in measured.items()]


def _rounds(
    networks: Networks, config: RolloutConfig, mesh: Mesh, phase: Phase, k: int
) -> Callable[[Params, Prompts], float]:
    """The seconds of a round of this phase, by running a few on all shards at once.

    What a round costs does not hang on which rows are still at work, nor on what is in them.
    """
    config = replace(config, draft_lengths=(), draft_length=max(config.lengths))

    def first(params: Params, prompts: Prompts) -> RoundState:
        noise, by = (jnp.int32(0), jnp.int32(-3)), prompts.tokens.shape[1] + config.max_new_tokens - phase.window
        state = begin(Decoding(networks.policy, networks.drafter, params, config), prompts, noise, phase.slots).state
        return kv.resize(state, -by)

    def some(params: Params, state: RoundState) -> RoundState:
        decoding = Decoding(networks.policy, networks.drafter, params, config)
        return jax.lax.fori_loop(0, ROUNDS, lambda _, state: round_once(decoding, state, k), state)

    rows = P(BATCH_AXES)
    each_shard = partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), rows), out_specs=rows, axis_names=set(BATCH_AXES), check_vma=False
    )
    begun = jax.jit(each_shard(first))
    # Donated, as a loop's own state is: what is timed copies no cache.
    run = jax.jit(each_shard(some), donate_argnums=1)

    def measure(params: Params, prompts: Prompts) -> float:
        state = jax.block_until_ready(begun(params, prompts))
        return seconds(partial(run, params, state)) / ROUNDS

    return measure


def load_cells(path: Path) -> list[Cell]:
    """The cells of a table that another run kept. Raises ConfigError where there is none, or none to fit a model to."""
    try:
        cells = [Cell(**cell) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cost_table = {path}: no table of costs: {error}") from None
    for cell in cells:
        for name, least in {"slots": 1, "window": 1, "draft_length": 0}.items():
            value = getattr(cell, name)
            if type(value) is not int or value < least:
                raise ConfigError(f"cost_table = {path}: {name} = {value!r}: must be an integer of at least {least}")
        if type(cell.seconds) not in (int, float) or not 0 < cell.seconds < math.inf:
            raise ConfigError(f"cost_table = {path}: seconds = {cell.seconds!r}: must be > 0 and finite")
    if len({cell[:3] for cell in cells}) < 2:
        raise ConfigError(f"cost_table = {path}: {len(cells)} cells: must be of two different rounds at least")
    return cells

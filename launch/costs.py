"""The seconds that a round takes on this machine, in the phases of a run: measured, fitted, written down, reused."""

import json
import math
import statistics
import time
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
    rollout = setup.train.rollout
    cells = _measured(setup, params) if cells is None else cells
    model = fit(cells)
    kept = {"cells": [cell._asdict() for cell in cells], "model": model._asdict()}
    write_atomically(path, json.dumps(kept, indent=2) + "\n")
    seconds = [[model.seconds(phase.slots, phase.window, k) for k in rollout.lengths] for phase in setup.phases]
    return np.array(seconds, np.float32)


def _measured(setup: Setup, params: Params) -> list[Cell]:
    """Rounds of every phase at the shortest and the longest draft length, and of the last at those between."""
    networks, mesh, lengths = setup.networks, setup.mesh, setup.train.rollout.lengths
    wanted = {(phase, k) for phase in setup.phases for k in (lengths[0], lengths[-1])}
    wanted |= {(setup.phases[-1], k) for k in lengths}
    with jax.set_mesh(mesh):
        gathered = jax.jit(partial(prepare, policy=networks.policy))(params)
        prompts = place(setup.train_prompts.batch(np.arange(setup.config.data.prompts)), mesh)
        timed = partial(_seconds, networks, gathered, setup.train.rollout, prompts, mesh)
        return [Cell(phase.slots, phase.window, k, timed(phase, k)) for phase, k in sorted(wanted)]


def _seconds(
    networks: Networks,
    params: Params,
    config: RolloutConfig,
    prompts: Prompts,
    mesh: Mesh,
    phase: Phase,
    k: int,
) -> float:
    """A round of this phase: the median of a few runs of a few rounds, on all shards at once.

    What a round costs does not hang on which rows are still at work, nor on what is in them.
    """
    fixed = replace(config, draft_lengths=(), draft_length=max(config.lengths))
    by = prompts.tokens.shape[1] + config.max_new_tokens - phase.window

    def first(params: Params, prompts: Prompts) -> RoundState:
        noise = jnp.int32(0), jnp.int32(-3)
        state = begin(Decoding(networks.policy, networks.drafter, params, fixed), prompts, noise, phase.slots).state
        return replace(kv.resize(state, -by), keys=jax.random.key_data(state.keys))

    def some(params: Params, state: RoundState) -> jax.Array:
        state = replace(state, keys=jax.random.wrap_key_data(state.keys))
        decoding = Decoding(networks.policy, networks.drafter, params, fixed)
        return jax.lax.fori_loop(0, ROUNDS, lambda _, state: round_once(decoding, state, k), state).emitted

    rows = P(BATCH_AXES)
    each_shard = partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), rows), out_specs=rows, axis_names=set(BATCH_AXES), check_vma=False
    )
    state = jax.jit(each_shard(first))(params, prompts)
    run = jax.jit(each_shard(some)).lower(params, state).compile()
    jax.block_until_ready(run(params, state))
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(run(params, state))
        seconds.append((time.perf_counter() - start) / ROUNDS)
    return statistics.median(seconds)


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

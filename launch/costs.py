"""The seconds that a round takes on this machine, in the phases of a run: measured, fitted, written down, reused."""

import json
import statistics
from collections.abc import Sequence
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
    """Rounds of every phase at the shortest and the longest draft length, and of the last at those between."""
    lengths = rollout.lengths
    with jax.set_mesh(mesh):
        gathered, prompts = jax.jit(partial(prepare, policy=networks.policy))(params), place(prompts, mesh)
        cells = []
        for phase in sorted(set(phases)):
            wanted = lengths if phase == phases[-1] else sorted({lengths[0], lengths[-1]})
            measured = _seconds(networks, gathered, rollout, prompts, mesh, phase, wanted)
            cells += [Cell(phase.slots, phase.window, *one) for one in measured.items()]
        return cells


def _seconds(
    networks: Networks,
    params: Params,
    config: RolloutConfig,
    prompts: Prompts,
    mesh: Mesh,
    phase: Phase,
    lengths: Sequence[int],
) -> dict[int, float]:
    """A round of this phase at each draft length: the median of a few runs of a few rounds, on all shards at once.

    What a round costs does not hang on which rows are still at work, nor on what is in them.
    """
    fixed = replace(config, draft_lengths=(), draft_length=max(config.lengths))
    by = prompts.tokens.shape[1] + config.max_new_tokens - phase.window

    def first(params: Params, prompts: Prompts) -> RoundState:
        noise = jnp.int32(0), jnp.int32(-3)
        state = begin(Decoding(networks.policy, networks.drafter, params, fixed), prompts, noise, phase.slots).state
        return replace(kv.resize(state, -by), keys=jax.random.key_data(state.keys))

    def some(params: Params, state: RoundState, k: int) -> jax.Array:
        state = replace(state, keys=jax.random.wrap_key_data(state.keys))
        decoding = Decoding(networks.policy, networks.drafter, params, fixed)
        return jax.lax.fori_loop(0, ROUNDS, lambda _, state: round_once(decoding, state, k), state).emitted

    rows = P(BATCH_AXES)
    each_shard = partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), rows), out_specs=rows, axis_names=set(BATCH_AXES), check_vma=False
    )
    state = jax.jit(each_shard(first))(params, prompts)
    runs = {
        k: partial(jax.jit(each_shard(partial(some, k=k))).lower(params, state).compile(), params, state)
        for k in lengths
    }
    for run in runs.values():
        jax.block_until_ready(run())
    measured = in_turns({k: partial(seconds, run) for k, run in runs.items()}, REPEATS)
    return {k: statistics.median(values) / ROUNDS for k, values in measured.items()}


def load_cells(path: Path) -> list[Cell]:
    """The cells of a table that another run kept. Raises ConfigError where there is none."""
    try:
        return [Cell(**cell) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cost_table = {path}: no table of costs: {error}") from None

"""Memory per device while each program of a step runs, by component."""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from launch.costs.round_timer import first_rows
from launch.setup.experiment import Experiment
from launch.setup.memory import abstract_copy, held_ahead
from specjax.adapters import joined
from specjax.parallel.memory import bytes_per_device, shard_shape
from specjax.parallel.mesh import BATCH_AXES, batch_shards, spec
from specjax.rollout.plan import choose_lengths
from specjax.rollout.rounds import Decoding
from specjax.types import LayerCache, Params, Prompts, PyTree, TrainState

Components = dict[str, int]
TEMPORARIES = "activations and other temporaries"
SECOND_GRADIENTS = "second copy of the gradients"


def components(
    name: str, experiment: Experiment, state: TrainState, batches: PyTree, compiled: jax.stages.Compiled
) -> Components:
    """Return bytes per device by component while the program `name` runs on its mesh: `generate` or `update`.

    Weights, moments, copies, caches and gradients follow from shapes and shardings. Temporaries are the remainder of
    XLA's total for the program.

    batches: the program's arguments after the state, as shapes. They are split by rows.
    """
    memory = compiled.memory_analysis()
    assert memory is not None
    batches = jax.tree.map(partial(_by_rows, program_mesh(name, experiment)), batches)
    # Count arguments here: XLA drops those that a program does not read, but they are in memory too.
    total = sum(held(name, experiment, state).values()) + bytes_per_device(batches)
    total += memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.temp_size_in_bytes
    known = known_components(name, experiment, state)
    spare = total - sum(known.values())
    if SECOND_GRADIENTS in known:
        # XLA may have found a way without it, or without a part.
        known[SECOND_GRADIENTS] += min(max(spare, -known[SECOND_GRADIENTS]), 0)
    return known | {TEMPORARIES: max(spare, 0)}


def known_components(name: str, experiment: Experiment, state: TrainState) -> Components:
    """Return the components of `components` that follow from shapes and shardings, without compiling."""
    before, params = held(name, experiment, state), state.params
    if name == "update":
        trained = params.policy if experiment.config.draft_training.mode == "frozen" else (params.policy, params.draft)
        # One is the sum over microbatches. The other is a microbatch's, and after the last one what is clipped.
        size = bytes_per_device(trained)
        return before | {"gradients": size, SECOND_GRADIENTS: size}
    if experiment.rollout_mesh is experiment.mesh:
        copy = abstract_copy(experiment)
        before |= {"copy for the rollout": _copied(params, copy)}
    return before | {"caches": _caches(experiment)}


def program_mesh(name: str, experiment: Experiment) -> Mesh:
    """Return the devices that run a program. They differ if the run is asynchronous."""
    return experiment.rollout_mesh if name == "generate" else experiment.mesh


def held(name: str, experiment: Experiment, state: TrainState) -> Components:
    """Return bytes per device of what the program's mesh holds before it runs."""
    mesh, rollout_mesh = experiment.mesh, experiment.rollout_mesh
    if rollout_mesh is mesh:
        return resident(state)
    ahead = held_ahead(experiment, state)
    if name == "update":
        # A device of a smaller mesh sends to several devices.
        return resident(state) | {"parts of a copy to send": max(rollout_mesh.size // mesh.size, 1) * ahead.parts}
    return {
        "copies of the networks": ahead.copies,
        "parts of the next copy": ahead.parts,
        "rollouts that wait": ahead.waiting,
    }


def resident(state: TrainState) -> Components:
    """Return bytes per device of the training state."""
    params = state.params
    frozen = {"frozen weights": bytes_per_device(params.base)} if params.base else {}
    return frozen | {
        "adapters" if params.base else "policy": bytes_per_device(params.policy),
        "draft": bytes_per_device(params.draft),
        "moments of the optimisers": bytes_per_device(state.optimizer),
        "reference policy": bytes_per_device(state.reference),
        "lookup and replay": bytes_per_device((params.memory, state.drafting, state.adaptation)),
    }


def checkpoint_copy(state: TrainState, devices: int) -> int:
    """Return the bytes of a host with so many devices that hold the state while it is written in the background.

    Every distinct part of an array is there once. The frozen weights of adapters are not in a checkpoint.
    """
    saved = replace(state, params=replace(state.params, base=()))
    parts = ((min(devices * math.prod(shard_shape(x)), x.size), x.dtype.itemsize) for x in jax.tree.leaves(saved))
    return sum(size * itemsize for size, itemsize in parts)


def _copied(params: Params, copy: Params) -> int:
    """Return the bytes per device of the rollout's copy, without frozen weights that it takes as they are."""
    held = {path: (shard_shape(x), x.dtype) for path, x in jax.tree.leaves_with_path(params.base)}
    taken = [x for path, x in jax.tree.leaves_with_path(copy.base) if held.get(path) == (shard_shape(x), x.dtype)]
    return bytes_per_device(replace(copy, memory=())) - bytes_per_device(taken)


def _by_rows(mesh: Mesh, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return the argument split by rows, or whole if it has none that divide."""
    divides = x.shape and x.shape[0] % batch_shards(mesh) == 0
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P(BATCH_AXES) if divides else P()))


def _caches(experiment: Experiment) -> int:
    """Return the bytes per device of the policy's and the draft's caches in the first phase."""
    config, networks, mesh = experiment.config, experiment.networks, experiment.rollout_mesh
    rollout, phases = config.rollout, experiment.phases
    prompts = experiment.abstract_prompts(config.data.prompts // batch_shards(mesh))
    choice = jax.ShapeDtypeStruct((len(phases),), "int32") if rollout.draft_lengths else None
    params = joined(replace(networks.params, memory=()))

    def start(params: PyTree, prompts: Prompts, choice: jax.Array | None) -> PyTree:
        decoding = Decoding(networks.policy, networks.drafter, params, choose_lengths(rollout, choice))
        state = first_rows(decoding, prompts, phases[0], blank=True)
        return state.cache, state.draft

    leaves = jax.tree.leaves(
        jax.eval_shape(start, params, prompts, choice), is_leaf=lambda x: isinstance(x, LayerCache)
    )
    arrays: list[Any] = [x for leaf in leaves if isinstance(leaf, LayerCache) for x in leaf]
    return bytes_per_device(
        [x.update(sharding=NamedSharding(mesh, spec((None, "kv_heads", None, None), x.shape, mesh))) for x in arrays]
    )

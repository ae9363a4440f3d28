"""Memory per device while each program of a step runs, by component."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from launch.costs.round_timer import first_rows
from launch.setup.experiment import Experiment
from specjax.parallel.memory import bytes_per_device
from specjax.parallel.mesh import BATCH_AXES, batch_shards, spec
from specjax.rollout.generate import gathered_shardings, prepare
from specjax.rollout.plan import choose_lengths
from specjax.rollout.rounds import Decoding
from specjax.types import LayerCache, Prompts, PyTree, TrainState

Components = dict[str, int]
TEMPORARIES = "activations and other temporaries"


def components(
    name: str, experiment: Experiment, state: TrainState, batches: PyTree, compiled: jax.stages.Compiled
) -> Components:
    """Return bytes per device by component while the program `name` runs: `generate` or `update`.

    Weights, moments, copies, caches and gradients follow from shapes and shardings. Temporaries are the remainder of
    XLA's total for the program.

    batches: the program's arguments after the state, as shapes. They are split by rows.
    """
    memory = compiled.memory_analysis()
    assert memory is not None
    rows = NamedSharding(experiment.mesh, P(BATCH_AXES))
    batches = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), batches)
    # Count arguments here: XLA drops those that a program does not read, but they are in memory too.
    total = sum(resident(state).values()) + bytes_per_device(batches)
    total += memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.temp_size_in_bytes
    known = known_components(name, experiment, state)
    return known | {TEMPORARIES: max(total - sum(known.values()), 0)}


def known_components(name: str, experiment: Experiment, state: TrainState) -> Components:
    """Return the components of `components` that follow from shapes and shardings, without compiling."""
    if name == "generate":
        return resident(state) | _rollout(experiment, state)
    params = state.params
    trained = params.policy if experiment.config.draft_training.mode == "frozen" else (params.policy, params.draft)
    return resident(state) | {"gradients": bytes_per_device(trained)}


def resident(state: TrainState) -> Components:
    """Return bytes per device of the training state."""
    params = state.params
    return {
        "policy": bytes_per_device(params.policy),
        "draft": bytes_per_device(params.draft),
        "moments of the optimisers": bytes_per_device(state.optimizer),
        "reference policy": bytes_per_device(state.reference),
        "lookup and replay": bytes_per_device((params.memory, state.drafting, state.adaptation)),
    }


def _rollout(experiment: Experiment, state: TrainState) -> Components:
    networks = experiment.networks.policy, experiment.networks.drafter
    copy = jax.eval_shape(partial(prepare, *networks), state.params)
    layout = gathered_shardings(*networks, state.params)
    copy = jax.tree.map(lambda x, sharding: x.update(sharding=sharding), copy, layout)
    return {"copy for the rollout": bytes_per_device((copy.policy, copy.draft)), "caches": _caches(experiment)}


def _caches(experiment: Experiment) -> int:
    """Return the bytes per device of the policy's and the draft's caches in the first phase."""
    config, networks, mesh = experiment.config, experiment.networks, experiment.mesh
    rollout, phases = config.rollout, experiment.phases
    prompts = experiment.abstract_prompts(config.data.prompts // batch_shards(mesh))
    choice = jax.ShapeDtypeStruct((len(phases),), "int32") if rollout.draft_lengths else None
    params = replace(networks.params, memory=())

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

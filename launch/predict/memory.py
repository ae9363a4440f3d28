"""Bytes that each device holds at once while a program of a step runs, by part, counted from shapes and shardings."""

import math
from dataclasses import replace
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from launch.setup.experiment import Experiment
from specjax.log_probs import LOGIT_BYTES
from specjax.parallel.memory import bytes_per_device, shard_shape
from specjax.parallel.mesh import batch_shards, spec
from specjax.rollout.generate import copy_on
from specjax.rollout.plan import RolloutConfig, lay_out
from specjax.types import Params, PyTree, TrainState

ProgramName = Literal["generate", "update"]
PROGRAMS: tuple[ProgramName, ...] = get_args(ProgramName)
Parts = dict[str, int]
# Fraction of a GPU's memory that programs can use: CUDA and the collectives need some too.
USABLE = 0.95


def needed(name: ProgramName, experiment: Experiment, state: TrainState) -> Parts:
    """Return what a program of the step holds at once, however it is compiled: `held`, and the least beside it.

    A compiled program holds more.
    """
    before, config = held(name, experiment, state), experiment.config
    if name == "update":
        params = state.params
        trained = params.policy if config.draft_training.mode == "frozen" else (params.policy, params.draft)
        return before | {"gradients": bytes_per_device(trained)} | _of_microbatch(experiment)
    if experiment.rollout_mesh is experiment.mesh:
        before |= {"copy for the rollout": _copied(state.params, abstract_copy(experiment))}
    return before | of_step_rollout(experiment)


def held(name: ProgramName, experiment: Experiment, state: TrainState) -> Parts:
    """Return what the program's mesh holds before it runs."""
    mesh, rollout_mesh, lag = experiment.mesh, experiment.rollout_mesh, len(state.ahead)
    if rollout_mesh is mesh:
        return _resident(state)
    networks = abstract_copy(experiment)
    base, copy = bytes_per_device(networks.base), bytes_per_device(replace(networks, base=()))
    # The newest copy arrives in parts, which are joined later. With lag 0 it replaces the only one.
    part = copy // batch_shards(rollout_mesh) if lag else 0
    if name == "update":
        # A device of a smaller mesh sends to several devices.
        return _resident(state) | {"parts of a copy to send": max(rollout_mesh.size // mesh.size, 1) * part}
    return {
        # Those by which the rollouts under way are generated. They share the frozen base of adapters.
        "copies of the networks": base + (lag + 1) * copy,
        "parts of the next copy": part,
        "rollouts that wait": bytes_per_device([(each.prompts, each.rollout) for each in state.ahead]),
    }


def _resident(state: TrainState) -> Parts:
    """Return the training state."""
    teacher = {"teacher": bytes_per_device(state.teacher)} if state.teacher else {}
    return of_networks(state.params) | {
        "moments of the optimisers": bytes_per_device(state.optimizer),
        "reference policy": bytes_per_device(state.reference),
        **teacher,
        "lookup and replay": bytes_per_device((state.params.memory, state.drafting, state.adaptation)),
    }


def of_networks(params: Params) -> Parts:
    """Return the parameters of both networks."""
    frozen = {"frozen weights": bytes_per_device(params.base)} if params.base else {}
    trained = "adapters" if params.base else "policy"
    return frozen | {trained: bytes_per_device(params.policy), "draft": bytes_per_device(params.draft)}


def of_step_rollout(experiment: Experiment) -> Parts:
    """Return what the rollout of a training step adds."""
    prompts = experiment.config.data.prompts, experiment.prompt_width
    return of_rollout(experiment, experiment.config.rollout, prompts, experiment.rollout_mesh)


def of_rollout(experiment: Experiment, rollout: RolloutConfig, prompts: tuple[int, int], mesh: Mesh) -> Parts:
    """Return the caches of the phase that needs most, the logits of a verification, and the tokens.

    prompts: number of prompts, and the tokens to which they are padded.
    """
    count, width = prompts
    sequences = max(count * rollout.group_size // batch_shards(mesh), 1)
    slots = lay_out(rollout, sequences, width)[0].slots
    # Of phases with as many slots, the last one holds the longest row.
    room, networks = max(rollout.room, experiment.rollout_on(()).room), experiment.networks
    length = width + rollout.max_new_tokens + room

    def start() -> PyTree:
        drafts = max(rollout.lengths) > 0
        of_draft = networks.drafter.init_cache(slots, length, rollout.slack) if drafts else ()
        return networks.policy.init_cache(slots, length), of_draft

    def on_mesh(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return x.update(sharding=NamedSharding(mesh, spec((None, "kv_heads", None, None), x.shape, mesh)))

    return {
        "caches": bytes_per_device(jax.tree.map(on_mesh, jax.eval_shape(start))),
        "logits of a verification": 4 * slots * rollout.slack * networks.policy.vocab_size,
        "tokens of the rollout": 4 * sequences * rollout.max_new_tokens,
    }


class Microbatch(NamedTuple):
    """Rows of a microbatch on a data shard, and the tokens that pass the policy: a prompt once for its group."""

    rows: int
    tokens: int


def microbatch_of(experiment: Experiment) -> Microbatch:
    """Return the size of the microbatches of an update."""
    config, prompt = experiment.config, experiment.prompt_width
    parts = batch_shards(experiment.mesh) * config.updates.minibatches * config.microbatches
    rows = config.trained_groups(config.data.prompts) * config.rollout.group_size // parts
    samples = config.sharing(experiment.networks.policy, rows, prompt)
    return Microbatch(rows, rows * config.rollout.max_new_tokens + rows // samples * prompt)


def _of_microbatch(experiment: Experiment) -> Parts:
    """Return the logits and the residual stream of a microbatch."""
    config, (rows, tokens), decoder = experiment.config, microbatch_of(experiment), experiment.networks.decoder
    item, budget = jnp.dtype(experiment.networks.policy.dtype).itemsize, config.rollout.max_new_tokens
    positions = min(config.logit_chunk or budget, budget)
    logits = item * rows * positions * experiment.networks.policy.vocab_size // experiment.mesh.shape["tensor"]
    if config.logit_chunk is None:
        logits = min(logits, item * LOGIT_BYTES // 4)
    stream = 0 if decoder is None else item * tokens * decoder.hidden_size * decoder.num_layers
    return {"logits of a microbatch": logits, "activations of a microbatch": stream}


def program_mesh(name: ProgramName, experiment: Experiment) -> Mesh:
    """Return the devices that run a program. They differ if the run is asynchronous."""
    return experiment.rollout_mesh if name == "generate" else experiment.mesh


def abstract_copy(experiment: Experiment) -> Params:
    """Return the parameters as rollouts have them, cast and gathered over data and fsdp, as ShapeDtypeStructs.

    Adapters and their frozen base are apart.
    """
    networks = experiment.networks
    return copy_on(experiment.rollout_mesh, networks.policy, networks.drafter, networks.params)


def _copied(params: Params, copy: Params) -> int:
    """Return the bytes of the rollout's copy, without what it takes as it is."""
    before = {path: (shard_shape(x), x.dtype) for path, x in jax.tree.leaves_with_path(params)}
    leaves = jax.tree.leaves_with_path(replace(copy, memory=()))
    return bytes_per_device([x for path, x in leaves if before.get(path) != (shard_shape(x), x.dtype)])


def checkpoint_copy(state: TrainState, devices: int) -> int:
    """Return the bytes of a host with so many devices that hold the state while it is written in the background.

    Every distinct part of an array is there once. Frozen weights, of adapters and a teacher, are not in a checkpoint.
    """
    saved = replace(state, params=replace(state.params, base=()), teacher=None)
    parts = ((min(devices * math.prod(shard_shape(x)), x.size), x.dtype.itemsize) for x in jax.tree.leaves(saved))
    return sum(size * itemsize for size, itemsize in parts)

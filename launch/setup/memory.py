"""Lower bound on the memory that a run needs per device, checked before anything is allocated or compiled.

The estimate counts only arrays that must exist at the same time, so that a run that fits is never refused. A compiled
program needs more.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from launch.errors import as_config_error
from launch.setup.experiment import Experiment
from launch.setup.rollout_trace import trace_rollout
from launch.setup.state import abstract_state
from specjax.log_probs import LOGIT_BYTES
from specjax.parallel.memory import MemoryPart, bytes_per_device, check_memory, growing
from specjax.parallel.mesh import batch_shards
from specjax.rollout.generate import copy_on
from specjax.rollout.plan import RolloutConfig, lay_out
from specjax.types import Params, TrainState


def check_rollout(
    experiment: Experiment, rollout: RolloutConfig, prompts: tuple[int, int], rows: Mapping[str, int]
) -> None:
    """Raise ConfigError if the devices cannot hold a rollout, or if one's own rollout function cannot be traced.

    prompts: number of prompts, and the tokens to which they are padded.
    rows: the options that set the number of sequences, and their values.
    """
    with as_config_error():
        parts = [*_parameters(experiment), *_rollout(experiment, rollout, prompts, rows, experiment.mesh)]
        check_memory(parts, experiment.mesh)
    if experiment.config.rollout.function is not None:
        trace_rollout(experiment, rollout, prompts[0], experiment.mesh)


def check_training(experiment: Experiment) -> None:
    """Raise ConfigError if the devices cannot hold a training step: its rollout, or one of its updates."""
    with as_config_error():
        for parts, mesh in training_memory(experiment):
            check_memory(parts, mesh)


def training_memory(experiment: Experiment) -> list[tuple[list[MemoryPart], Mesh]]:
    """Return what must be in memory at once during the rollout of a step, and during an update, with the devices."""
    config = experiment.config
    rows = {"data.prompts": config.data.prompts, "rollout.group_size": config.rollout.group_size}
    state = [*_parameters(experiment), *_training_state(experiment)]
    mesh, rollout_mesh = experiment.mesh, experiment.rollout_mesh
    prompts = config.data.prompts, experiment.prompt_width
    rollout = _rollout(experiment, config.rollout, prompts, rows, rollout_mesh)
    generating = [*(state if rollout_mesh is mesh else _ahead(experiment, rows)), *rollout]
    return [(generating, rollout_mesh), ([*state, *_update(experiment, rows)], mesh)]


def _parameters(experiment: Experiment) -> list[MemoryPart]:
    params, mesh = experiment.networks.params, experiment.mesh
    trained = bytes_per_device(replace(params, base=()))
    if not params.base:
        return [_sharded("parameters", trained, mesh)]
    frozen = _sharded("frozen weights", bytes_per_device(params.base), mesh)
    return [frozen, _sharded("adapters and draft", trained, mesh)]


def _ahead(experiment: Experiment, rows: Mapping[str, int]) -> list[MemoryPart]:
    """Return what the rollout mesh of an asynchronous run holds while the first of the rollouts under way is generated.

    The copies of the networks by which all of them are generated, the parts in which the newest copy arrives, which
    are joined after that rollout, and the rollouts that wait.
    """
    lag, held = experiment.config.asynchronous.lag or 0, held_ahead(experiment, abstract_state(experiment))
    name, option = "parameters", "asynchronous.rollout_mesh.tensor"
    remedy = "must be more, or the networks smaller"
    if lag:
        name = f"{lag + 1} copies of the parameters, and parts of one"
        if experiment.networks.params.base:
            name += ", all beside one frozen base"
        remedy += f", or asynchronous.lag = {lag} less"
    return [
        MemoryPart(name, held.copies + held.parts, option, experiment.rollout_mesh.shape["tensor"], remedy),
        growing("rollouts that wait", held.waiting, {**rows, **_widths(experiment)}, "asynchronous.lag less"),
    ]


class HeldAhead(NamedTuple):
    """Bytes per device of the rollout mesh of an asynchronous run while the first of its rollouts is generated.

    Attributes:
        copies:  Networks by which the rollouts under way are generated. They share the frozen base of adapters.
        parts:   The newest copy as it arrives, before its parts are joined. 0 with lag 0, which has no other copy then.
        waiting: Rollouts that wait for their updates, with their prompts.
    """

    copies: int
    parts: int
    waiting: int


def held_ahead(experiment: Experiment, state: TrainState) -> HeldAhead:
    """Return what the rollout mesh holds beside caches. state: with the rollouts that wait."""
    lag, networks = len(state.ahead), abstract_copy(experiment)
    base, copy = bytes_per_device(networks.base), bytes_per_device(replace(networks, base=()))
    waiting = bytes_per_device([(each.prompts, each.rollout) for each in state.ahead])
    parts = copy // batch_shards(experiment.rollout_mesh) if lag else 0
    return HeldAhead(base + (lag + 1) * copy, parts, waiting)


def abstract_copy(experiment: Experiment) -> Params:
    """Return the parameters as rollouts have them, cast and gathered over data and fsdp, as ShapeDtypeStructs.

    Adapters and their frozen base are apart.
    """
    networks = experiment.networks
    return copy_on(experiment.rollout_mesh, networks.policy, networks.drafter, networks.params)


def _sharded(name: str, size: int, mesh: Mesh) -> MemoryPart:
    """Return a part as large as the networks, sharded by fsdp."""
    return MemoryPart(name, size, "mesh.fsdp", mesh.shape["fsdp"], "must be more, or the networks smaller")


def _training_state(experiment: Experiment) -> list[MemoryPart]:
    """Return the moments of the optimisers, the reference policy, and the rollouts kept for replay."""
    config, mesh, state = experiment.config, experiment.mesh, abstract_state(experiment)
    moments, reference = bytes_per_device(state.optimizer), bytes_per_device(state.reference)
    replayed = bytes_per_device(state.adaptation)
    options = {"draft_training.replay": config.draft_training.replay, **_widths(experiment)}
    return [
        _sharded("moments of the optimisers", moments, mesh),
        _sharded("the reference policy", reference, mesh),
        growing("rollouts to replay", replayed, options),
    ]


def _rollout(
    experiment: Experiment, rollout: RolloutConfig, prompts: tuple[int, int], rows: Mapping[str, int], mesh: Mesh
) -> list[MemoryPart]:
    """Return the caches of the phase that needs most, the logits of a verification, and the tokens."""
    (count, width), policy, tensor = prompts, experiment.networks.policy, mesh.shape["tensor"]
    sequences = max(count * rollout.group_size // batch_shards(mesh), 1)
    phases = lay_out(rollout, sequences, width)
    caches = [jax.eval_shape(partial(policy.init_cache, slots, window + rollout.slack)) for slots, window in phases]
    logits = 4 * phases[0].slots * (max(rollout.lengths) + 1) * policy.vocab_size
    # The smallest change first.
    less = " or ".join(f"--{name.replace('_', '-')}" for name in (*rows, "data.max_prompt_tokens"))
    hint = f"fewer slots in --rollout.phases, or less of {less}"
    options = {**rows, **_widths(experiment, width)}
    lengths = {"rollout.draft_length": max(rollout.lengths), **rows}
    return [
        growing("caches of the rollout", max(map(bytes_per_device, caches)) // tensor, options, hint),
        growing("logits of a verification", logits, lengths, hint),
        growing("tokens of the rollout", 4 * sequences * rollout.max_new_tokens, options),
    ]


def _update(experiment: Experiment, rows: Mapping[str, int]) -> list[MemoryPart]:
    """Return the gradients, and the logits and the residual stream of a microbatch."""
    config, networks, mesh = experiment.config, experiment.networks, experiment.mesh
    options, width, decoder = {**rows, **_widths(experiment)}, sum(_widths(experiment).values()), networks.decoder
    parts = batch_shards(mesh) * config.updates.minibatches * config.microbatches
    sequences = config.trained_groups(config.data.prompts) * config.rollout.group_size // parts
    item, budget = jnp.dtype(networks.policy.dtype).itemsize, config.rollout.max_new_tokens
    positions = min(config.logit_chunk or budget, budget)
    samples = config.sharing(networks.policy, sequences, width - budget)
    logits = item * sequences * positions * networks.policy.vocab_size // mesh.shape["tensor"]
    if config.logit_chunk is None:
        logits = min(logits, item * LOGIT_BYTES // 4)
    tokens = sequences * budget + sequences // samples * (width - budget)
    stream = 0 if decoder is None else item * tokens * decoder.hidden_size * decoder.num_layers
    return [
        _sharded("gradients of what is trained", bytes_per_device(networks.params.policy), mesh),
        growing("logits of a microbatch", logits, options, "logit_chunk less, or microbatches more"),
        growing("activations of a microbatch", stream, options, "microbatches more"),
    ]


def _widths(experiment: Experiment, width: int | None = None) -> dict[str, int]:
    """Return the options that bound the parts of the longest row, and the tokens of these parts.

    width: tokens to which prompts are padded. None: those of a training step.
    """
    tokens = experiment.config.rollout.max_new_tokens
    prompt = "tokens of the longest prompt (data.max_prompt_tokens)"
    return {prompt: width or experiment.prompt_width, "rollout.max_new_tokens": tokens}

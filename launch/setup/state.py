"""The training state before the first step, as arrays and as shapes."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from launch.setup.experiment import Experiment
from launch.setup.rollout_trace import trace_rollout
from specjax.asynchronous.step import waiting_sharding
from specjax.train.state import abstract_train_state, init_train_state
from specjax.types import Ahead, Params, TrainState


def fresh_state(experiment: Experiment, params: Params, seconds: np.ndarray | None) -> TrainState:
    """Return the training state before the first step.

    seconds: measured seconds per round, float32 [phases, draft lengths]; None if the draft length is fixed.
    """
    return init_train_state(
        params, experiment.step_config, experiment.mesh, seconds=seconds, **_state_arguments(experiment)
    )


def abstract_state(experiment: Experiment) -> TrainState:
    """Return the state as ShapeDtypeStructs with shardings. Allocates nothing."""
    config, params = experiment.step_config, experiment.networks.params
    lengths = config.rollout.draft_lengths
    seconds = jax.ShapeDtypeStruct((len(experiment.phases), len(lengths)), jnp.float32) if lengths else None
    state = abstract_train_state(params, config, experiment.mesh, seconds=seconds, **_state_arguments(experiment))
    if not config.asynchronous.lag:
        return state
    return replace(state, ahead=(_abstract_ahead(experiment, state),) * config.asynchronous.lag)


def _abstract_ahead(experiment: Experiment, state: TrainState) -> Ahead:
    config, mesh = experiment.step_config, experiment.rollout_mesh
    waiting, everywhere = waiting_sharding(mesh), NamedSharding(mesh, P())
    rollout = trace_rollout(experiment, config.rollout, config.data.prompts, mesh, training=True)
    shapes = rollout, experiment.abstract_prompts(config.data.prompts)
    rollout, prompts = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=waiting), shapes)
    version = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
    return Ahead(prompts, rollout, Params(version, version), state.drafting)


def _state_arguments(experiment: Experiment) -> dict[str, Any]:
    """Return what a state keeps beside networks and moments."""
    config = experiment.config
    return {
        "with_reference": config.loss.kl_coefficient > 0,
        "prompts": (config.data.prompts, experiment.prompt_width),
        "teacher": None if experiment.teacher is None else experiment.teacher.params,
    }

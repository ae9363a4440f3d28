"""The training state before the first step, as arrays and as shapes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from launch.build.experiment import Experiment
from specjax.train.state import abstract_train_state, init_train_state
from specjax.types import Params, TrainState


def fresh_state(experiment: Experiment, params: Params, seconds: np.ndarray | None) -> TrainState:
    """Return the training state before the first step.

    seconds: measured seconds per round, float32 [phases, draft lengths]; None if the draft length is fixed.
    """
    return init_train_state(params, experiment.config, experiment.mesh, seconds=seconds, **_kept(experiment))


def abstract_state(experiment: Experiment) -> TrainState:
    """Return the state as ShapeDtypeStructs with shardings. Allocates nothing."""
    config, params = experiment.config, experiment.networks.params
    lengths = config.rollout.draft_lengths
    seconds = jax.ShapeDtypeStruct((len(experiment.phases), len(lengths)), jnp.float32) if lengths else None
    return abstract_train_state(params, config, experiment.mesh, seconds=seconds, **_kept(experiment))


def _kept(experiment: Experiment) -> dict[str, Any]:
    """Return what a state keeps beside networks and moments."""
    config = experiment.config
    return {
        "with_reference": config.loss.kl_coefficient > 0,
        "prompts": (config.data.prompts, config.data.max_prompt_tokens),
    }

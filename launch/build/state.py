"""Construction of the initial training state."""

import numpy as np

from launch.build.experiment import Experiment
from specjax.train.train_step import init_train_state
from specjax.types import Params, TrainState


def fresh_state(experiment: Experiment, params: Params, seconds: np.ndarray | None) -> TrainState:
    """Return the training state before the first step.

    seconds: measured seconds per round, float32 [phases, draft lengths]; None if the draft length is fixed.
    """
    config = experiment.config
    prompts_shape = config.data.prompts, config.data.max_prompt_tokens
    return init_train_state(params, config, experiment.mesh, config.loss.kl_coefficient > 0, seconds, prompts_shape)

"""Initial training state of a run."""

import numpy as np

from launch.build.experiment import Experiment
from specjax.train.train_step import init_train_state
from specjax.types import Params, TrainState


def fresh_state(experiment: Experiment, params: Params, seconds: np.ndarray | None) -> TrainState:
    """Return the training state before the first step.

    seconds: measured seconds of a round, [phases, draft lengths]; None if the draft length is fixed.
    """
    config = experiment.config
    prompts = config.data.prompts, config.data.max_prompt_tokens
    return init_train_state(
        params, experiment.config, experiment.mesh, config.loss.kl_coefficient > 0, seconds, prompts
    )

"""A policy loss of one's own: Simple Policy Optimization (arXiv 2401.16025), which has no clip.

The clipped loss of PPO stops pushing a token once its ratio has left the trust region. SPO pulls it back instead, by a
quadratic penalty whose minimum lies at the region's edge. The metric is logged as `loss/ratio_deviation`.

    python -m launch.train tiny --loss.function examples.custom_loss:loss
"""

import jax.numpy as jnp

from specjax import LossConfig, LossInputs, LossOutput


def loss(inputs: LossInputs, config: LossConfig) -> LossOutput:
    """Return -(r A - |A| / (2 epsilon) (r - 1)^2) of each token, with epsilon = loss.clip_high."""
    ratio = jnp.exp(inputs.theta - inputs.old)
    penalty = jnp.abs(inputs.advantage) * (ratio - 1) ** 2 / (2 * config.clip_high)
    return LossOutput(penalty - ratio * inputs.advantage, {"ratio_deviation": jnp.abs(ratio - 1)})

"""Example of a custom policy loss: Simple Policy Optimization (SPO, arXiv 2401.16025), which has no clip.

PPO's clipped loss has no gradient for a token whose ratio has left the trust region. SPO pulls the ratio back with a
quadratic penalty, whose minimum lies at the region's edge. The metric is logged as `loss/ratio_deviation`.

    python -m launch.train tiny --loss.function examples.custom_loss:loss
"""

import jax.numpy as jnp

from specjax import LossConfig, LossInputs, LossOutput


def loss(inputs: LossInputs, config: LossConfig) -> LossOutput:
    """Return the loss of each token, -(r A - |A| / (2 epsilon) (r - 1)^2), with epsilon = loss.clip_high."""
    ratio = jnp.exp(inputs.theta - inputs.old)
    penalty = jnp.abs(inputs.advantage) * (ratio - 1) ** 2 / (2 * config.clip_high)
    return LossOutput(penalty - ratio * inputs.advantage, {"ratio_deviation": jnp.abs(ratio - 1)})

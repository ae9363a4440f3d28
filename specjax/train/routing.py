"""The router's part of the policy's loss for a mixture of experts: balance of load, and comparison with the rollout."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from specjax.train.batch import TrainBatch
from specjax.types import Routing


class RouterSums(NamedTuple):
    """Sums over the sequences that train the policy.

    Attributes:
        balance:  Load-balance loss; over a batch the mean of the sequences and layers, 1 if all experts are alike.
        load:     [M, E], share of an expert in the tokens of a sequence, times E / A, weighted as the loss.
        compared: Number of tokens of which the rollout recorded the experts.
        rerouted: Number of these for which training chose other experts in some layer.
    """

    balance: Array
    load: Array
    compared: Array
    rerouted: Array


def routed(batch: TrainBatch) -> Bool[Array, "R S"]:
    """Return the tokens, prompts included, whose experts count: those of sequences that train the policy."""
    return batch.counted[:, None] & (jnp.arange(batch.tokens.shape[1])[None] < batch.lengths[:, None])


def sum_routing(routing: Routing, batch: TrainBatch, weight: Float[Array, "R S"]) -> RouterSums:
    """Sum what a microbatch's routers report. Only `balance`, the loss, is differentiable.

    It is the sequence-wise loss of DeepSeek-V3 (arXiv 2412.19437, equations 17 to 20): microbatches and meshes give the
    same gradient, which they do not for the product of two means over a batch.

    weight: weight of each token. Over a batch they sum to 1, equally over sequences.
    """
    by_sequence = jnp.sum(weight, axis=1)
    inside = weight / jnp.maximum(by_sequence, jnp.finfo(weight.dtype).tiny)[:, None]
    experts, active = routing.probs.shape[-1], routing.chosen.shape[-1]
    chosen = routing.chosen[..., None] == jnp.arange(experts)[None, None, None, None]
    each = jnp.where(chosen, inside[:, :, None, None, None], 0.0)
    load = jnp.sum(each, axis=(1, 3)) * (experts / active)
    mean = jnp.sum(inside[:, :, None, None] * routing.probs, axis=1)
    balance = jnp.mean(jnp.sum(load * mean, axis=-1), axis=-1)
    compared, rerouted = jnp.zeros_like(weight, bool), jnp.zeros_like(weight, bool)
    if batch.routes is not None:
        # The rollout has not seen the last token of a sequence.
        compared = routed(batch) & (jnp.arange(weight.shape[1])[None] < batch.lengths[:, None] - 1)
        differ = jnp.sort(batch.routes.astype(jnp.int32), axis=-1) != jnp.sort(routing.chosen, axis=-1)
        rerouted = compared & jnp.any(differ, axis=(2, 3))
    return RouterSums(
        balance=jnp.sum(by_sequence * balance),
        load=jnp.sum(by_sequence[:, None, None] * load, axis=0),
        compared=jnp.sum(compared, dtype=jnp.float32),
        rerouted=jnp.sum(rerouted, dtype=jnp.float32),
    )

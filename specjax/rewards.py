"""Rewards inside the program: traced functions as they are, host scorers behind a callback."""

import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from specjax.mesh import AXES, BATCH_AXES
from specjax.types import Prompts, Reward, Rollout

RewardFn = Callable[[Rollout, Prompts], Reward]
HostScore = Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


def host_reward(score: HostScore, mesh: Mesh) -> RewardFn:
    """A reward function that asks the host, once per data shard.

    score: (tokens int32 [r, C], lengths int32 [r], prompt ids int32 [r]) -> (value float32 [r], correct float32 [r]),
           all numpy. A failed sample is NaN. Shards may call it concurrently. Where it raises, or returns other
           shapes, its whole call counts as failed and the log says why: in a callback that would abort the process.
    """

    def safely(*arrays: jax.Array) -> tuple[np.ndarray, np.ndarray]:
        tokens, lengths, ids = map(np.asarray, arrays)
        try:
            value, correct = (np.asarray(x, np.float32) for x in score(tokens, lengths, ids))
            if not value.shape == correct.shape == lengths.shape:
                raise ValueError(f"scores of shapes {value.shape} and {correct.shape} for {len(lengths)} samples")
            return value, correct
        except Exception:
            logging.getLogger(__name__).exception("the scorer failed: %d samples are not scored", len(lengths))
            return np.full(lengths.shape, np.nan, np.float32), np.zeros(lengths.shape, np.float32)

    def reward(rollout: Rollout, prompts: Prompts) -> Reward:
        ids = jnp.repeat(prompts.id, len(rollout.lengths) // len(prompts.id))
        rows = P(BATCH_AXES)
        call = jax.shard_map(
            _score_shard, mesh=mesh, in_specs=rows, out_specs=rows, axis_names=set(AXES), check_vma=False
        )
        return Reward(*call(rollout.tokens, rollout.lengths, ids))

    def _score_shard(tokens: jax.Array, lengths: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Replicas over tensor must agree on one answer, so the first asks and the others hear.
        zeros = jnp.zeros(len(lengths), jnp.float32)
        shape = jax.ShapeDtypeStruct(zeros.shape, zeros.dtype)
        value, correct = jax.lax.cond(
            jax.lax.axis_index("tensor") == 0,
            lambda: io_callback(safely, (shape, shape), tokens, lengths, ids),
            lambda: (zeros, zeros),
        )
        return jax.lax.psum((value, correct), "tensor")

    return reward

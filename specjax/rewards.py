"""Rewards inside the program: traced functions as they are, host scorers behind a callback."""

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

    score: (tokens int32 [r, C], lengths int32 [r], prompt ids int32 [r]) -> (value float32 [r], correct float32 [r]).
           It must not raise, which would abort the process: a failed sample is NaN. Shards may call it concurrently.
    """

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
            lambda: io_callback(score, (shape, shape), tokens, lengths, ids),
            lambda: (zeros, zeros),
        )
        return jax.lax.psum((value, correct), "tensor")

    return reward

"""Reward functions. A traced function is used as it is; `host_reward` wraps a scorer on the host in a callback."""

import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from specjax.parallel.mesh import AXES, BATCH_AXES
from specjax.types import Prompts, Reward, Rollout

RewardFn = Callable[[Rollout, Prompts], Reward]
HostScore = Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, ...]]


def host_reward(score: HostScore, mesh: Mesh, parts: tuple[str, ...] = ()) -> RewardFn:
    """Return a reward function that calls the scorer `score` on the host, once per data shard.

    score: (tokens int32 [r, C], lengths int32 [r], prompt ids int32 [r]) -> (value float32 [r], correct float32 [r]),
           all numpy. NaN marks a sample that could not be scored. Shards may call it concurrently. If it raises or
           returns other shapes, all samples of the call count as failed and the error is logged: raising from a
           callback would abort the process.
    parts: names of the value's components. If there are any, `score` returns them as a third array, float32 [r, parts].
    """

    def shapes(rows: int) -> list[tuple[int, ...]]:
        return [(rows,), (rows,), *([(rows, len(parts))] if parts else [])]

    def safely(*arrays: jax.Array) -> tuple[np.ndarray, ...]:
        tokens, lengths, ids = map(np.asarray, arrays)
        expected = shapes(len(lengths))
        try:
            scores = tuple(np.asarray(x, np.float32) for x in score(tokens, lengths, ids))
            if (found := [x.shape for x in scores]) != expected:
                raise ValueError(f"scores of shapes {found} for {len(lengths)} samples: must be {expected}")
            return scores
        except Exception:
            logging.getLogger(__name__).exception("the scorer failed: %d samples are not scored", len(lengths))
            value, *others = (np.zeros(shape, np.float32) for shape in expected)
            return np.full_like(value, np.nan), *others

    def reward(rollout: Rollout, prompts: Prompts) -> Reward:
        ids = jnp.repeat(prompts.id, len(rollout.lengths) // len(prompts.id))
        rows = P(BATCH_AXES)
        call = jax.shard_map(
            _score_shard, mesh=mesh, in_specs=rows, out_specs=rows, axis_names=set(AXES), check_vma=False
        )
        value, correct, *components = call(rollout.tokens, rollout.lengths, ids)
        return Reward(value, correct, dict(zip(parts, components[0].T, strict=True)) if components else None)

    def _score_shard(tokens: jax.Array, lengths: jax.Array, ids: jax.Array) -> tuple[jax.Array, ...]:
        # Replicas over tensor must get the same scores: the first one calls the host, psum passes them to the others.
        zeros = tuple(jnp.zeros(shape, jnp.float32) for shape in shapes(len(lengths)))
        scores = jax.lax.cond(
            jax.lax.axis_index("tensor") == 0,
            lambda: io_callback(safely, jax.tree.map(jax.typeof, zeros), tokens, lengths, ids),
            lambda: zeros,
        )
        return jax.lax.psum(scores, "tensor")

    return reward

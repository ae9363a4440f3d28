"""Reward functions: traced ones, and scorers on the host, between two programs or in a callback within one."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from specjax.parallel import processes
from specjax.parallel.mesh import AXES, BATCH_AXES, MODEL_AXES
from specjax.types import Prompts, Reward, Rollout

RewardFn = Callable[[Rollout, Prompts], Reward]
HostScore = Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, ...]]


@dataclass(frozen=True)
class HostReward:
    """Reward of a scorer on the host. It splits the step in two programs, and scores between them.

    The scorer gets the tokens that the policy drew: not what was observed between turns.

    Call it with a finished rollout and its prompts, not within a traced function; for that there is `host_reward`.

    Attributes:
        score: (tokens int32 [r, C], lengths int32 [r], prompt ids int32 [r]) -> (value float32 [r], correct float32
               [r]), all numpy. A value that is not finite in float32 marks a sample that could not be scored. If it
               raises or returns other shapes, all samples count as failed and the error is logged.
        parts: names of the value's components. If there are any, `score` returns them as a third array, float32
               [r, parts].
    """

    score: HostScore
    parts: tuple[str, ...] = ()

    def __call__(self, rollout: Rollout, prompts: Prompts) -> Reward:
        """Return the reward of each sequence, as numpy arrays."""
        rows, tokens = processes.own_rows(rollout.tokens)
        _, lengths = processes.own_rows(rollout.lengths)
        if rollout.sampled is not None:
            tokens, lengths = _drawn(tokens, lengths, processes.own_rows(rollout.sampled)[1])
        total, ids = len(rollout.lengths), processes.fetch(prompts.id)
        scores = _scored(self.score, self.parts, tokens, lengths, ids[rows // (total // len(ids))])
        return _reward(self.parts, *processes.join_rows(rows, scores, total))

    def shapes(self, rollout: Rollout) -> Reward:
        """Return the reward of each sequence as ShapeDtypeStructs. Scores nothing."""
        shapes = _shapes(len(rollout.lengths), self.parts)
        return jax.eval_shape(lambda: _reward(self.parts, *(jnp.zeros(shape, jnp.float32) for shape in shapes)))


def finite_or_failed(reward: Reward) -> Reward:
    """Return the reward with NaN for values that float32 cannot hold. A sample without a value is not correct."""
    xp = np if isinstance(reward.value, np.ndarray) else jnp
    finite = xp.isfinite(reward.value)
    return replace(reward, value=xp.where(finite, reward.value, np.nan), correct=xp.where(finite, reward.correct, 0))


def with_returns(reward: RewardFn) -> RewardFn:
    """Return the reward function whose values have the returns of the rollout's environment added, if it has one."""

    def scored(rollout: Rollout, prompts: Prompts) -> Reward:
        score, returns = reward(rollout, prompts), rollout.returns
        if returns is not None:
            returns = processes.fetch(returns) if isinstance(score.value, np.ndarray) else returns
            score = replace(score, value=score.value + returns)
        return finite_or_failed(score)

    return scored


def no_reward(rollout: Rollout, prompts: Prompts) -> Reward:
    """Return a reward of 0 for every sequence, for a policy that learns only from a teacher."""
    zeros = jnp.zeros(rollout.lengths.shape, jnp.float32)
    return Reward(zeros, zeros)


def environment_reward(rollout: Rollout, prompts: Prompts) -> Reward:
    """Return a reward of 0, to which `with_returns` adds the environment's. A return above 0.5 counts as correct."""
    assert rollout.returns is not None
    return Reward(jnp.zeros_like(rollout.returns), (rollout.returns > 0.5).astype(jnp.float32))


def compiled_reward(reward: RewardFn) -> RewardFn:
    """Return `with_returns` for finished rollouts: of a traced reward jitted, of one on the host as it is."""
    return with_returns(reward) if isinstance(reward, HostReward) else jax.jit(with_returns(reward))


def host_reward(score: HostScore, mesh: Mesh, parts: tuple[str, ...] = ()) -> RewardFn:
    """Return a traced reward function that calls `score` in a callback, once per data shard, possibly concurrently.

    For one fused program with a scorer on the host. XLA does not cache programs with callbacks, so that every process
    compiles it; `HostReward` has no such cost. score, parts: as in `HostReward`. Raising from a callback would abort
    the process.
    """

    def reward(rollout: Rollout, prompts: Prompts) -> Reward:
        ids = jnp.repeat(prompts.id, len(rollout.lengths) // len(prompts.id))
        rows = P(BATCH_AXES)
        call = jax.shard_map(
            _score_shard, mesh=mesh, in_specs=rows, out_specs=rows, axis_names=set(AXES), check_vma=False
        )
        return _reward(parts, *call(*drawn(rollout), ids))

    def _score_shard(tokens: jax.Array, lengths: jax.Array, ids: jax.Array) -> tuple[jax.Array, ...]:
        # Replicas of a shard must get the same scores: the first one calls the host, psum passes them to the others.
        zeros = tuple(jnp.zeros(shape, jnp.float32) for shape in _shapes(len(lengths), parts))
        scores = jax.lax.cond(
            jax.lax.axis_index(MODEL_AXES) == 0,
            lambda: io_callback(on_host, jax.tree.map(jax.typeof, zeros), tokens, lengths, ids),
            lambda: zeros,
        )
        return jax.lax.psum(scores, MODEL_AXES)

    def on_host(*arrays: jax.Array) -> tuple[np.ndarray, ...]:
        tokens, lengths, ids = processes.fetch_here(arrays)
        return _scored(score, parts, tokens, lengths, ids)

    return reward


def drawn(rollout: Rollout) -> tuple[jax.Array, jax.Array]:
    """Return the tokens that the policy drew, int32 [R, C], left-aligned, then zeros, and their numbers, int32 [R]."""
    if rollout.sampled is None:
        return rollout.tokens, rollout.lengths
    return _drawn(rollout.tokens, rollout.lengths, rollout.sampled)


def _drawn(tokens: Any, lengths: Any, sampled: Any) -> tuple[Any, Any]:
    """Return what `drawn` does, of numpy's or JAX's arrays."""
    xp: Any = np if isinstance(tokens, np.ndarray) else jnp
    sampled = sampled & (xp.arange(tokens.shape[1])[None] < lengths[:, None])
    order, lengths = xp.argsort(~sampled, axis=1, stable=True), xp.sum(sampled, axis=1, dtype=np.int32)
    drawn = xp.take_along_axis(tokens, order, axis=1)
    return xp.where(xp.arange(tokens.shape[1])[None] < lengths[:, None], drawn, xp.zeros_like(drawn)), lengths


def _shapes(rows: int, parts: tuple[str, ...]) -> list[tuple[int, ...]]:
    return [(rows,), (rows,), *([(rows, len(parts))] if parts else [])]


def _scored(
    score: HostScore, parts: tuple[str, ...], tokens: np.ndarray, lengths: np.ndarray, ids: np.ndarray
) -> tuple[np.ndarray, ...]:
    """Return the scores, or those of failed samples if the scorer raises or returns other shapes."""
    expected = _shapes(len(lengths), parts)
    if not len(lengths):  # another process owns the shards of this one's devices
        return tuple(np.zeros(shape, np.float32) for shape in expected)
    try:
        with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and so counts as failed
            scores = tuple(np.array(x, np.float32) for x in score(tokens, lengths, ids))
        if (found := [x.shape for x in scores]) != expected:
            raise ValueError(f"scores of shapes {found} for {len(lengths)} samples: must be {expected}")
        return scores
    except Exception:
        logging.getLogger(__name__).exception("the scorer failed: %d samples are not scored", len(lengths))
        value, *others = (np.zeros(shape, np.float32) for shape in expected)
        return np.full_like(value, np.nan), *others


def _reward(parts: tuple[str, ...], value: Any, correct: Any, *components: Any) -> Reward:
    return finite_or_failed(
        Reward(value, correct, dict(zip(parts, components[0].T, strict=True)) if components else None)
    )

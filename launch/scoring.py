"""The reward function that a run's configuration names."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from configs.schema import RewardConfig
from launch.data import Problem
from launch.rewards import HostScorer, RewardPool
from launch.tokenizers import Tokenizer
from specjax.rewards import RewardFn, host_reward
from specjax.types import Prompts, Reward, Rollout

TRACED = "exact_traced"


def make_pool(config: RewardConfig) -> RewardPool | None:
    """The scorer processes, or None where the reward is traced."""
    return None if config.scorer == TRACED else RewardPool(config.scorer, config.workers, config.time_limit_s)


def make_reward(pool: RewardPool | None, problems: Sequence[Problem], tokenizer: Tokenizer, mesh: Mesh) -> RewardFn:
    """The reward of completions of `problems`, which prompts name by their ids."""
    if pool is None:
        return traced_exact(problems, tokenizer)
    return host_reward(HostScorer(pool, tokenizer, problems), mesh)


def traced_exact(problems: Sequence[Problem], tokenizer: Tokenizer) -> RewardFn:
    """1 where a completion ends in '#', the answer and the stop token, else 0; compared as token ids."""
    endings = [[*tokenizer.encode(f"#{problem.answer}"), tokenizer.stop_tokens[0]] for problem in problems]
    width = max(map(len, endings))
    # Right-aligned, as completions end; -1 matches anything.
    table = np.full((len(endings), width), -1, np.int32)
    for row, ending in zip(table, endings, strict=True):
        row[width - len(ending) :] = ending

    def reward(rollout: Rollout, prompts: Prompts) -> Reward:
        ids = jnp.repeat(prompts.id, len(rollout.lengths) // len(prompts.id))
        expected = jnp.asarray(table)[jnp.maximum(ids, 0)]
        column = rollout.lengths[:, None] - width + jnp.arange(width)[None]
        found = jnp.take_along_axis(rollout.tokens, jnp.maximum(column, 0), axis=1)
        match = (expected < 0) | ((column >= 0) & (found == expected))
        correct = match.all(axis=1).astype(jnp.float32)
        return Reward(value=jnp.where(ids >= 0, correct, jnp.nan), correct=correct)

    return reward

"""Selection of the groups and sequences to train on, and the length punishment (DAPO)."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from specjax.carry_over.groups import divide_groups
from specjax.options import NonNegative, Options, Weight
from specjax.parallel.mesh import BATCH_AXES, batch_shards
from specjax.rollout.plan import RolloutConfig
from specjax.train.batch import ScoredSequences
from specjax.types import Reward, Rollout


@dataclass(frozen=True)
class SelectionConfig(Options):
    """Options of selection and of the length punishment: DAPO (arXiv 2503.14476).

    By default every completion with a reward is trained on.

    Attributes:
        groups:           Dynamic sampling: train on the first so many prompts whose samples differ in reward. The step
                          generates more; if fewer differ, fewer count. 0: train on all.
        drop_truncated:   Overlong filtering: completions cut by the length budget do not count.
        overlong_buffer:  Soft punishment: over the last so many tokens of the budget the reward falls linearly; 0: off.
        overlong_penalty: What the reward has lost at the end of the budget.
    """

    groups: NonNegative = 0
    drop_truncated: bool = False
    overlong_buffer: NonNegative = 0
    overlong_penalty: Weight = 1.0


def overlong_punishment(lengths: Array, budget: int, config: SelectionConfig) -> Float[Array, "R"]:
    """Return the length punishment of each completion, <= 0, which is added to its reward (DAPO, equation 13)."""
    buffer = max(config.overlong_buffer, 1)
    over = (lengths - (budget - buffer)).astype(jnp.float32) / buffer
    return -config.overlong_penalty * jnp.clip(over, 0.0, 1.0) if config.overlong_buffer else jnp.zeros(lengths.shape)


def withhold_rewards(scores: Reward, rollout: Rollout, config: RolloutConfig) -> Reward:
    """Return the rewards with NaN in groups that go on or are dropped: they enter no statistics and train nothing."""
    groups = divide_groups(rollout, len(rollout.lengths) // config.group_size, config)
    if groups is None:
        return scores
    return replace(scores, value=jnp.where(jnp.repeat(groups.trained, config.group_size), scores.value, jnp.nan))


def drop_truncated(sequences: ScoredSequences, rollout: Rollout) -> ScoredSequences:
    """Mark truncated sequences, which no stop token or string ended, as not counted."""
    if rollout.stopped is None:
        raise ValueError("drop_truncated = True: the rollout does not tell which sequences it stopped")
    return replace(sequences, counted=sequences.counted & rollout.stopped)


def keep_groups(sequences: ScoredSequences, unusable: Bool[Array, "N"], groups: int, mesh: Mesh) -> ScoredSequences:
    """Return the rows of the first `groups` groups that are not `unusable`, padded with other groups that do not count.

    Groups are chosen over all data shards, so that the choice does not depend on the mesh; their rows may move between
    shards. Rows that do not count get no reward and enter no statistics. Raises ValueError if the groups do not divide
    over the shards, or if there are fewer.
    """
    shards, size = batch_shards(mesh), len(sequences.tokens) // len(unusable)
    if groups % shards or groups > len(unusable):
        raise ValueError(f"groups = {groups}: must be a multiple of {shards} data shards, and at most {len(unusable)}")
    kept = jnp.argsort(unusable, stable=True)[:groups]
    counts = jnp.repeat(~unusable[kept], size)
    rows = (kept[:, None] * size + jnp.arange(size)[None]).ravel()
    chosen = jax.tree.map(lambda x: x[rows], sequences)
    chosen = replace(chosen, counted=chosen.counted & counts, reward=jnp.where(counts, chosen.reward, jnp.nan))
    return jax.lax.with_sharding_constraint(chosen, NamedSharding(mesh, P(BATCH_AXES)))

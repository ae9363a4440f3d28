from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from specjax.parallel.mesh import BATCH_AXES
from specjax.train.advantage import group_advantages
from specjax.train.batch import ScoredSequences
from specjax.train.selection import SelectionConfig, drop_truncated, keep_groups, overlong_punishment
from specjax.types import Rollout
from tests.refusals import refuses
from tests.specjax.training import mesh_of

GROUP = 3


def batch_of(rewards: np.ndarray) -> ScoredSequences:
    """Return a batch of distinct rows with these rewards. Rows without a reward do not count."""
    rows = len(rewards)
    tokens = jnp.arange(2 * rows, dtype=jnp.int32).reshape(rows, 2)
    return ScoredSequences(
        tokens=tokens,
        completion=jnp.ones((rows, 2), bool),
        mu=-tokens.astype(jnp.float32),
        reward=jnp.array(rewards, jnp.float32),
        counted=jnp.array(np.isfinite(rewards)),
    )


@pytest.mark.parametrize("buffer, penalty", [(4, 1.0), (10, 0.5), (1, 2.0)])
def test_the_reward_falls_in_a_line_over_the_buffer(buffer: int, penalty: float) -> None:
    """DAPO, equation 13, with the length budget as L_max and the buffer as L_cache."""
    lengths, budget = np.arange(11), 10
    expected = [
        0.0 if n <= budget - buffer else ((budget - buffer) - n) / buffer if n <= budget else -1.0 for n in lengths
    ]
    config = SelectionConfig(overlong_buffer=buffer, overlong_penalty=penalty)
    got = overlong_punishment(jnp.array(lengths), budget, config)
    np.testing.assert_allclose(got, penalty * np.array(expected), atol=1e-6)
    assert not overlong_punishment(jnp.array(lengths), budget, SelectionConfig()).any()


def test_truncated_sequences_train_the_draft_alone() -> None:
    batch = batch_of(np.array([1.0, np.nan, 0.0]))
    stopped = jnp.array([True, True, False])
    rollout = Rollout(batch.tokens, jnp.full(3, 2), stopped=stopped)
    np.testing.assert_array_equal(drop_truncated(batch, rollout).counted, [True, False, False])
    with refuses("drop_truncated = True:"):
        drop_truncated(batch, replace(rollout, stopped=None))


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 1)])
def test_the_first_groups_that_differ_are_kept_whatever_the_mesh(shape: tuple[int, int, int]) -> None:
    """Six of eight groups are kept. Five have different rewards, two of them on the first of two shards."""
    mesh = mesh_of(*shape)
    equal = np.array([True, False, True, False, True, False, False, False])
    rewards = np.where(np.repeat(equal, GROUP), 1.0, np.resize([0.0, 1.0, 5.0], 24))
    rewards[5] = np.nan
    rows = NamedSharding(mesh, P(BATCH_AXES))
    batch, flags = jax.device_put((batch_of(rewards), jnp.array(equal)), rows)
    with jax.set_mesh(mesh):
        kept = jax.jit(lambda batch, equal: keep_groups(batch, equal, 6, mesh))(batch, flags)
    groups = [1, 3, 5, 6, 7, 0]
    order = np.array([group * GROUP + i for group in groups for i in range(GROUP)])
    assert kept.tokens.sharding.is_equivalent_to(rows, 2)
    np.testing.assert_array_equal(kept.tokens, np.asarray(batch.tokens)[order])
    np.testing.assert_array_equal(kept.mu, np.asarray(batch.mu)[order])
    counts = np.repeat(~equal[groups], GROUP) & np.isfinite(rewards[order])
    np.testing.assert_array_equal(kept.counted, counts)
    np.testing.assert_array_equal(kept.reward, np.where(counts, rewards[order], np.nan))
    # Groups that only fill the batch are not in the statistics.
    alone = group_advantages(jnp.array(rewards[order[counts | np.isnan(rewards[order])]], jnp.float32), GROUP)
    np.testing.assert_allclose(group_advantages(kept.reward, GROUP)[counts], alone[np.isfinite(alone) & (alone != 0)])


@pytest.mark.parametrize("groups", [3, 10])
def test_a_number_of_groups_that_shards_do_not_divide_is_refused(groups: int) -> None:
    batch = batch_of(np.zeros(24))
    with refuses(f"groups = {groups}: ...2...8"):
        keep_groups(batch, jnp.zeros(8, bool), groups, mesh_of(2, 1, 1))

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from specjax.parallel.mesh import BATCH_AXES
from specjax.train.batch import join_completions, split
from specjax.types import Prompts, Rollout
from tests.specjax.training import mesh_of

GROUP, PROMPT, BUDGET = 3, 5, 7


def job() -> tuple[Prompts, Rollout, np.ndarray]:
    """Return ragged prompts and completions, with arbitrary values in all padding."""
    rng = np.random.default_rng(0)
    prompt_lengths = np.array([5, 1, 3, 4], np.int32)
    rows = len(prompt_lengths) * GROUP
    lengths = np.resize(np.array([7, 0, 4, 1, 6], np.int32), rows)
    prompts = Prompts(
        tokens=rng.integers(1, 50, (len(prompt_lengths), PROMPT), np.int32),
        lengths=prompt_lengths,
        id=np.arange(len(prompt_lengths), dtype=np.int32),
    )
    rollout = Rollout(
        tokens=rng.integers(50, 100, (rows, BUDGET), np.int32),
        lengths=lengths,
        full=np.float32(-rng.random((rows, BUDGET))),
    )
    return prompts, rollout, np.where(np.arange(rows) == 2, np.float32(np.nan), np.arange(rows, dtype=np.float32))


def test_rows_hold_a_prompt_its_completion_and_zeros() -> None:
    prompts, rollout, reward = job()
    join = jax.jit(join_completions)
    joined = join(prompts, rollout, reward)
    batch, trained = jax.device_get((joined, joined.trained))
    assert batch.tokens.shape == (len(rollout.lengths), PROMPT + BUDGET) and batch.mu is not None
    for row, (tokens, completion, mu) in enumerate(zip(batch.tokens, batch.completion, batch.mu, strict=True)):
        start, length = int(prompts.lengths[row // GROUP]), int(rollout.lengths[row])
        end = start + length
        np.testing.assert_array_equal(tokens[:start], prompts.tokens[row // GROUP, :start])
        np.testing.assert_array_equal(tokens[start:end], rollout.tokens[row, :length])
        np.testing.assert_array_equal(tokens[end:], 0)
        np.testing.assert_array_equal(np.flatnonzero(completion), np.arange(start, end))
        np.testing.assert_array_equal(mu[start:end], rollout.full[row, :length])
    np.testing.assert_array_equal(batch.reward, reward)
    # Row 2 has no reward, so it trains only the draft.
    assert not trained[2].any() and batch.completion[2].sum() == 4
    others = np.arange(len(reward)) != 2
    np.testing.assert_array_equal(trained[others], batch.completion[others])
    assert join(prompts, Rollout(rollout.tokens, rollout.lengths), reward).mu is None


def test_split_is_a_permutation_of_the_rows() -> None:
    tree = {"tokens": jnp.arange(24).reshape(12, 2), "lengths": jnp.arange(12)}
    parts = split(tree, 3)
    assert parts["tokens"].shape == (3, 4, 2)
    np.testing.assert_array_equal(np.sort(np.asarray(parts["lengths"]).ravel()), np.arange(12))
    np.testing.assert_array_equal(parts["tokens"][..., 0], 2 * parts["lengths"])
    assert split({"none": None}, 3) == {"none": None}


def test_split_moves_no_row_to_another_data_shard() -> None:
    mesh = mesh_of(2, 2, 2)
    rows = jax.device_put(jnp.arange(48).reshape(24, 2), NamedSharding(mesh, P(BATCH_AXES)))
    layout = NamedSharding(mesh, P(None, BATCH_AXES))
    compiled = jax.jit(lambda x: split(x, 3), out_shardings=layout).lower(rows).compile()
    owner = {shard.device: set(np.asarray(shard.data).ravel().tolist()) for shard in rows.addressable_shards}
    for shard in compiled(rows).addressable_shards:
        assert set(np.asarray(shard.data).ravel().tolist()) == owner[shard.device]
    assert "all-" not in compiled.as_text() and "collective" not in compiled.as_text()

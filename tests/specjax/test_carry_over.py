"""Rollouts that end before their last sequences, and the steps that go on with these."""

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from specjax.keys import seed_step
from specjax.rollout.plan import RolloutConfig
from specjax.rollout.speculative import speculative_rollout
from specjax.testing.exact import completion_law, count_completions, fit
from specjax.train.carry_over import carry, nothing_carried, with_carried, with_versions
from specjax.types import CarriedOver, Params, Prompts, Rollout
from tests.tiny import ENUMERABLE, WANDERING, World


def rollouts(world: World, drafter: str, draft: str, config: RolloutConfig, steps: int) -> list[Rollout]:
    """Return the rollouts of the same prompts, each of which goes on with what the one before left."""

    @jax.jit
    def run(params: Params, carried: CarriedOver, step: jax.Array) -> tuple[Rollout, CarriedOver]:
        prompts = with_carried(world.batch, carried)
        rollout = speculative_rollout(
            world.policy, world.drafters[drafter], params, prompts, (jnp.int32(5), step), config
        )
        rollout = with_versions(rollout, prompts.carried, step)
        return rollout, carry(config, world.batch, rollout)

    found, (count, width) = [], world.batch.tokens.shape
    carried = nothing_carried(config, count, width)
    for step in range(steps):
        rollout, carried = run(world.params(draft), carried, jnp.int32(step))
        # Also those groups that are whole, so that every row has one completion in the end.
        carried = replace(carried, prompts=world.batch, kept=jnp.ones_like(carried.kept))
        found.append(jax.tree.map(np.asarray, rollout))
    return found


def test_a_completion_that_several_rollouts_write_has_the_exact_law() -> None:
    """Rows that end early are short. If one of them were drawn again, the law would be another."""
    world, budget = ENUMERABLE, 5
    config = RolloutConfig(
        group_size=100_000, max_new_tokens=budget, draft_length=2, stop_tokens=world.stops, carry_over=0.2
    )
    parts = rollouts(world, "table", "none", config, 8)
    assert parts[-1].done.all() and np.unique(parts[-1].versions).size >= 3
    (prompt,) = world.prompts
    cells = completion_law(world.logits, prompt, world.vocab, world.stops, budget, config.law)
    result = fit(Counter(count_completions(parts[-1])), cells)
    assert result.passes and result.power > 0.9, result


def test_coupled_tokens_are_a_function_of_the_step_that_wrote_them_and_of_the_prefix() -> None:
    """Each part is that of plain decoding in the same step, whose prompt is all that was there before."""
    world, group = WANDERING, 3
    plain = RolloutConfig(
        group_size=group, max_new_tokens=12, draft_length=0, stop_tokens=world.stops, verifier="coupled"
    )
    width, rows = world.batch.tokens.shape[1], len(world.prompts) * group
    # Phases shrink the batch to fewer slots than are left over, and hold longer rows than some that go on.
    drafted = replace(plain, draft_length=2, carry_over=0.6, phases=((rows, 6), (rows, 12), (3, width + 12)))
    first, *later = rollouts(world, "eagle3", "random", drafted, 3)
    assert 3 < (~first.done).sum() <= drafted.left_over(rows) == 7
    unbroken = world.rollout("none", "none", plain, seed_step(5, 0))
    column, reached = np.arange(12)[None], first.lengths[:, None]
    np.testing.assert_array_equal(first.tokens, np.where(column < reached, unbroken.tokens, 0))
    np.testing.assert_allclose(first.full, np.where(column < reached, unbroken.full, 0), atol=1e-4)

    @jax.jit
    def decode(prompts: Prompts, step: jax.Array) -> Rollout:
        run = jnp.int32(5), step
        params = world.params("none")
        return speculative_rollout(world.policy, world.drafters["none"], params, prompts, run, plain)

    owner, before = np.arange(rows) // group, first
    for step, rollout in enumerate(later, 1):
        np.testing.assert_array_equal(rollout.carried, before.lengths)
        going_on = ~before.done
        assert going_on.any() and (rollout.lengths[going_on] > before.lengths[going_on]).all()
        texts = np.zeros((rows, width + 12), np.int32)
        for row in range(rows):
            text = (*world.prompts[owner[row]], *before.tokens[row, : before.lengths[row]])
            texts[row, : len(text)] = text
        ends = np.array([len(world.prompts[prompt]) for prompt in owner]) + before.lengths
        rest = decode(Prompts(jnp.asarray(texts), jnp.asarray(ends), world.batch.id[owner]), jnp.int32(step))
        for row, start in enumerate(before.lengths):
            end, sample = rollout.lengths[row], row * group + row % group
            np.testing.assert_array_equal(rollout.tokens[row, start:end], rest.tokens[sample, : end - start])
            np.testing.assert_allclose(rollout.full[row, start:end], rest.full[sample, : end - start], atol=1e-4)
            np.testing.assert_array_equal(rollout.versions[row, start:end], step)
            # What earlier rollouts wrote is kept, to the bit.
            for name in ("tokens", "law", "full", "writer", "versions"):
                kept, old = getattr(rollout, name)[row, :start], getattr(before, name)[row, :start]
                np.testing.assert_array_equal(kept, old, err_msg=name)
        before = rollout

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from launch.errors import RunStopped
from launch.guard import SkippedUpdates
from specjax.types import Prompts, Rollout

PROMPTS = Prompts(jnp.array([[3, 4], [5, 0]]), jnp.array([2, 1]), jnp.array([7, 9]))


def rollout(step: int) -> Rollout:
    return Rollout(jnp.full((4, 3), step), jnp.full(4, 3), full=jnp.full((4, 3), -0.5))


def run(guard: SkippedUpdates, skipped: list[int]) -> None:
    for step, count in enumerate(skipped, start=1):
        guard(step, {"update/skipped": jnp.int32(count)}, PROMPTS, rollout(step))


def test_a_row_of_skipped_updates_ends_the_run_with_its_first_batch_saved(tmp_path: Path) -> None:
    guard = SkippedUpdates(tmp_path, 3)
    with pytest.raises(RunStopped, match="step 7: the policy's gradient was not finite in 3 steps in a row"):
        run(guard, [0, 1, 1, 0, 1, 1, 1, 1])
    # Of each row the first.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["skipped_step_2.npz", "skipped_step_5.npz"]
    with np.load(tmp_path / "skipped_step_5.npz") as saved:
        np.testing.assert_array_equal(saved["prompt_id"], [7, 9])
        np.testing.assert_array_equal(saved["tokens"], rollout(5).tokens)
        np.testing.assert_array_equal(saved["log_probs"], rollout(5).full)


def test_a_step_that_learnt_something_is_no_part_of_the_row(tmp_path: Path) -> None:
    run(SkippedUpdates(tmp_path, 2, updates=4), [4, 3, 4, 1])
    with pytest.raises(RunStopped):
        run(SkippedUpdates(tmp_path, 2, updates=4), [4, 4])


def test_without_a_limit_a_run_goes_on(tmp_path: Path) -> None:
    run(SkippedUpdates(tmp_path, 0), [1] * 20)
    assert len(list(tmp_path.iterdir())) == 1

import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from launch.run.step_checks import KEPT_FILES, SkippedUpdates
from launch.run.step_timer import DispatchedStep
from specjax.train.batch import TrainBatch
from specjax.types import Prompts, Rollout

PROMPTS = Prompts(jnp.array([[3, 4], [5, 0]]), jnp.array([2, 1]), jnp.array([7, 9]))


def rollout(step: int) -> Rollout:
    rows = jnp.full((4, 5), -0.5)
    batch = TrainBatch(
        tokens=jnp.full((4, 5), step),
        completion=jnp.ones((4, 5), bool),
        mu=rows,
        reward=jnp.array([0.0, jnp.nan, 1.0, 2.0]),
        counted=jnp.array([True, False, True, True]),
        advantage=rows + 3,
        old=rows + 1,
        reference=rows + 2,
    )
    return Rollout(jnp.full((4, 3), step), jnp.full(4, 3), batch=batch)


def run(guard: SkippedUpdates, skipped: list[tuple[int, int | None]]) -> None:
    """Log steps with these skipped updates: (policy's, draft's) per step; None if no draft is trained."""
    for step, (policy, draft) in enumerate(skipped, start=1):
        metrics = {"update/skipped": jnp.int32(policy)} | ({} if draft is None else {"draft/skipped": jnp.int32(draft)})
        guard(DispatchedStep(step, 0.0, metrics, PROMPTS, rollout(step)))


def saved_steps(directory: Path) -> list[int]:
    return sorted(int(re.findall(r"skipped_step_(\d+).npz", path.name)[0]) for path in directory.iterdir())


def test_successive_skipped_updates_end_the_run(tmp_path: Path) -> None:
    guard = SkippedUpdates(tmp_path, 3)
    run(guard, [(0, None), (1, None), (1, None), (0, None), (1, None), (1, None)])
    assert guard.reason is None
    for step, skipped in ((7, 1), (8, 0)):
        guard(DispatchedStep(step, 0.0, {"update/skipped": jnp.int32(skipped)}, PROMPTS, rollout(step)))
        said = guard.reason or ""
        assert said.startswith("step 7: ") and said.endswith(str(tmp_path / "skipped_step_7.npz"))


def test_batches_saved_after_the_resumed_step_are_dropped(tmp_path: Path) -> None:
    """Otherwise batches that it saves again would count as the oldest. Without a limit, a run continues."""
    guard = SkippedUpdates(tmp_path, 0)
    run(guard, [(1, 0)] * 12)
    assert guard.reason is None and saved_steps(tmp_path) == list(range(13 - KEPT_FILES, 13))
    again = SkippedUpdates(tmp_path, 0, last_step=11)
    assert saved_steps(tmp_path) == list(range(13 - KEPT_FILES, 12))
    again(DispatchedStep(12, 0.0, {"update/skipped": jnp.int32(1)}, PROMPTS, rollout(12)))
    assert saved_steps(tmp_path) == list(range(13 - KEPT_FILES, 13))


@pytest.mark.parametrize("skipped", [(1, 0), (0, 1), (7, 0), (0, 8)])
def test_one_skipped_update_of_either_network_counts(tmp_path: Path, skipped: tuple[int, int]) -> None:
    guard = SkippedUpdates(tmp_path, 2)
    run(guard, [(0, 0), skipped, skipped])
    assert guard.reason is not None and saved_steps(tmp_path) == [2, 3]


def test_a_saved_batch_holds_all_inputs_of_its_loss(tmp_path: Path) -> None:
    run(SkippedUpdates(tmp_path, 0), [(0, None), (0, 1)])
    with np.load(tmp_path / "skipped_step_2.npz") as saved:
        expected = {f"prompt_{name}": x for name, x in vars(PROMPTS).items() if x is not None}
        expected |= {name: x for name, x in vars(rollout(2).batch).items() if x is not None}
        assert set(saved.files) == set(expected)
        for name, x in expected.items():
            np.testing.assert_array_equal(saved[name], x, err_msg=name)

"""Two processes of two devices each compute what one process of four does. All tests read the results of one job."""

import json
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from specjax.checkpoint import Checkpointer
from specjax.parallel.mesh import check_groups
from tests.jobs import finish_job, start_job, two_hosts
from tests.refusals import refuses
from tests.specjax.process_worker import HELD, STEPS, ahead, train
from tests.specjax.training import GROUP, make_prompts, mesh_of, state_on


class Job(NamedTuple):
    """Results of two processes: those of each, the common ones, the directory they wrote to, and what they printed."""

    found: list[dict[str, Any]]
    made: dict[str, Any]
    out: Path
    printed: list[str]


one_process = cache(lambda: train()[0] | {"ahead": ahead()[0]})


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    out = tmp_path_factory.mktemp("job")
    started = start_job(["-m", "tests.specjax.process_worker", str(out)], count=2, devices=2)
    expected = one_process()
    printed = finish_job(started)
    leaves = np.load(out / "made.npz")
    made = jax.tree.unflatten(jax.tree.structure(expected), [leaves[name] for name in leaves.files])
    found = [json.loads((out / f"process_{index}.json").read_text()) for index in range(2)]
    return Job(found, made, out, printed)


@pytest.mark.slow
def test_two_hosts_of_different_addresses_are_one_job(tmp_path: Path) -> None:
    with two_hosts(tmp_path) as hosts:
        worker = ["-m", "tests.specjax.process_worker", str(tmp_path)]
        finish_job(start_job(worker, count=2, devices=2, address="10.77.0.1", hosts=hosts))
    found = json.loads((tmp_path / "process_1.json").read_text())
    assert found["talk"]["gathered"] == [0, 1] and found["saved"] == [True, True]


def test_two_processes_take_the_steps_of_one(job: Job) -> None:
    assert len(job.made["tokens"]) == STEPS
    jax.tree.map(np.testing.assert_array_equal, job.made["tokens"], one_process()["tokens"])
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), job.made["params"], one_process()["params"])
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-5), job.made["metrics"], one_process()["metrics"]
    )


def test_all_devices_are_connected_before_the_first_step_is_compiled(job: Job) -> None:
    """XLA's line for each new connection comes before the step: see specjax.parallel.connections."""
    for printed in job.printed:
        before, steps = printed.partition("trained")[0].split("mesh made")
        assert "[Gloo] Rank" in before and "[Gloo]" not in steps


def test_a_host_reward_scores_each_sample_in_the_process_that_owns_it(job: Job) -> None:
    ids = np.repeat(np.asarray(make_prompts().id), GROUP).tolist()
    mine, theirs = ids[: len(ids) // 2], ids[len(ids) // 2 :]
    # Both steps, and the callback of a compiled program, which jax calls once per data shard.
    assert [each["asked"] for each in job.found] == [[mine] * (STEPS + 1), [theirs] * (STEPS + 1)]
    np.testing.assert_array_equal(job.made["reward"].value, one_process()["reward"].value)


def test_processes_exchange_values_errors_and_signals_or_work_as_if_there_were_no_others(job: Job) -> None:
    for index, each in enumerate(found["talk"] for found in job.found):
        assert each["agreed"] == ["from", 0] and each["gathered"] == [0, 1] and each["on_primary"] == 0
        assert each["fetched"] == {"x": list(range(8)), "y": 28, "z": 1.5}
        assert each["owned"] == [4 * index + row for row in range(4)] and each["joined"] == list(range(0, 16, 2))
        assert each["error"] == "not here" and each["signals"] == [None, 15]
        assert each["within"] == [[1, 0, True, ["own"], "own", owner] for owner in range(2)]
        assert each["elsewhere"] == ["here", "elsewhere"][index]


def test_meshes_without_a_device_of_some_process_are_refused(job: Job) -> None:
    for one, two in (found["talk"]["refused"] for found in job.found):
        assert one.startswith("mesh = (2, 1, 1, 1): uses 2 devices, and process 1 would have none")
        assert two.startswith(
            "mesh and asynchronous.rollout_mesh = (1, 1, 1, 1) and (1, 1, 1, 1): uses 2 devices, and process 1 would"
        )


@pytest.mark.parametrize("shape", [(4, 1, 1, 2), (1, 2, 4, 1), (1, 1, 2, 4)])
def test_groups_of_model_axes_fill_processes_of_four_devices_or_divide_them(shape: tuple[int, ...]) -> None:
    check_groups(shape, [device // 4 for device in range(8)])


@pytest.mark.parametrize(
    ("size", "owners", "message"),
    [
        (3, [0, 0, 0, 0, 1, 1], "= 3: would join 1 of the 4 devices of process 0 with others"),
        (4, [0, 0, 1, 1, 1, 1, 2, 2], "= 4: would join 2 of the 4 devices of process 1 with others"),
    ],
)
def test_a_group_of_model_axes_over_parts_of_two_processes_is_refused(
    size: int, owners: list[int], message: str
) -> None:
    with refuses(f"mesh.expert x mesh.tensor {message}"):
        check_groups((2, 1, 1, size), owners)


def test_two_processes_save_and_restore_to_the_bit_with_rollouts_in_flight(job: Job) -> None:
    for found in job.found:
        assert found["saved"] == [True, True]
        data, equal, leaves = found["ahead"]["saved"]
        assert data == {"position": 5} and equal and leaves > 4


def test_one_process_on_another_mesh_restores_what_two_have_saved(job: Job) -> None:
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_on(mesh_of(1, 2, 1))
    )
    with Checkpointer(job.out / "checkpoints") as saves:
        restored = saves.restore(abstract)
        assert saves.best_step() == 1
    assert restored.data == {"position": 2}
    jax.tree.map(np.testing.assert_array_equal, restored.state.params, job.made["params"])


def test_networks_and_rollouts_pass_between_the_processes_of_two_meshes(job: Job) -> None:
    for each in job.found:
        assert each["sent"] == [[[0, 2, 4, 6], [8, 10, 12, 14]], [0, 1, 2]] * 2
    got, expected = job.made["ahead"], one_process()["ahead"]
    assert got["lag"] == 1
    jax.tree.map(np.testing.assert_array_equal, got["tokens"], expected["tokens"])
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), got["params"], expected["params"])


def test_neither_waits_for_the_other_of_a_rollout_and_the_update_before_its_own(job: Job) -> None:
    """An order of events in two processes, which excludes both serial orders of the two. The first steps compile."""
    ends, others = (found["ahead"]["ends"] for found in job.found)
    updates, rollouts = ends["updates"], others["rollouts"]
    # The rollout for update HELD + 1 was begun and ended before update HELD began.
    assert job.found[0]["ahead"]["held"] == [HELD] and rollouts[HELD] < updates[HELD - 1]
    # Update HELD + 1 began and ended before the rollout for the next, which was dispatched before it, had ended.
    assert rollouts[HELD] < updates[HELD] < rollouts[HELD + 1]

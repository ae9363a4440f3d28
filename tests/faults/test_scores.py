"""Faults that put a reward on the wrong sample, or lose it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from configs.schema.rewards import RewardConfig
from launch.rewards.pool import RewardPool
from tests.launch.processes import gone

SCORERS = Path(__file__).parent.parent / "launch"
TIME_LIMIT_S = 2.0


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCORERS)
        with RewardPool(RewardConfig("sample_scorers:by_command", workers=2, time_limit_s=TIME_LIMIT_S)) as pool:
            yield pool


def score(pool: RewardPool, *completions: str) -> list[float]:
    return pool.score(completions, [""] * len(completions))[:, 0].tolist()


@pytest.mark.parametrize("command", ["fork", "fork_raise"])
def test_row_01_a_scorer_that_forks_gets_its_own_values(pool: RewardPool, command: str) -> None:
    for _ in range(2):  # the second batch would get what the first left over
        assert score(pool, *(f"{command} {i}" for i in range(12))) == list(range(12))


@pytest.mark.parametrize(
    "message",
    [
        "x",
        "\0" * 8,
        "{}",
        "null",
        "[1, 0, 2, [9.0]]",
        "[[1], 0, 0, [9.0]]",
        "1" * 2**21,
        "[" * 10**5,
    ],
    ids=["text", "zeros", "object", "null", "forged", "nested", "long", "deep"],
)
def test_row_01_a_scorer_that_writes_to_the_channel_loses_its_sample_alone(pool: RewardPool, message: str) -> None:
    values = score(pool, "value 1", f"scribble {message}", *(f"value {i}" for i in range(2, 20)))
    np.testing.assert_array_equal(values, [1, np.nan, *range(2, 20)])


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_row_01_no_child_of_a_scorer_outlives_its_worker(pool: RewardPool) -> None:
    daemons = [int(pid) for pid in score(pool, *["daemon"] * 2)]
    assert not gone(daemons, within_s=0)
    score(pool, *["exit"] * 16)
    assert gone(daemons)

"""Faults that could assign a reward to the wrong sample, or lose it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from configs.schema.rewards import RewardConfig
from launch.cli.errors import ConfigError
from launch.data.problems import Problem, read_problems
from launch.data.tokenizers import ByteTokenizer
from launch.rewards.pool import RewardPool
from launch.rewards.reward_fn import make_reward, unscorable_answers
from launch.rewards.scorers import load_scorer
from tests.launch.processes import gone
from tests.refusals import refuses

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
@pytest.mark.parametrize("ending", ["worker exits", "pool closes"])
def test_row_01_no_child_of_a_scorer_outlives_its_worker(monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    monkeypatch.syspath_prepend(SCORERS)
    with RewardPool(RewardConfig("sample_scorers:by_command", workers=2, time_limit_s=TIME_LIMIT_S)) as pool:
        children = [int(pid) for pid in score(pool, "daemon", "daemon bare", "orphan", "orphan")]
        assert not gone(children, within_s=0)
        if ending == "worker exits":
            # If one worker starts slowly, the other one may take all samples.
            assert any(score(pool, *["exit"] * 4) is not None and gone(children, within_s=2.0) for _ in range(20))
    assert gone(children, within_s=0)


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("number", "answer"),
    [("0.00001", "0.00001"), ("1e16", "10000000000000000"), ("-2.50E-3", "-0.00250"), ("7", "7"), ("-0.0", "-0.0")],
)
def test_row_05_numbers_are_written_out(tmp_path: Path, number: str, answer: str) -> None:
    path = write(tmp_path / "a.jsonl", f'{{"q": "x", "a": {number}, "unused": NaN}}')
    assert read_problems(path, "q", "a")[0].answer == answer


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e-999", "1" * 400])
def test_row_05_numbers_that_are_not_finite_are_refused(tmp_path: Path, number: str) -> None:
    path = write(tmp_path / "a.jsonl", '{"q": "x", "a": 1}', f'{{"q": "x", "a": {number}}}')
    with refuses("/...a.jsonl:2: field 'a'", ConfigError):
        read_problems(path, "q", "a")


@pytest.mark.parametrize(("scorer", "good"), [("math", ["0.00001", "\\frac{1}{2}", "70,000"]), ("exact", ["7", "a b"])])
def test_row_05_answers_that_cannot_score_are_counted(
    scorer: str, good: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    if scorer == "math":
        pytest.importorskip("math_verify")
    bad = "four{" if scorer == "math" else "#4"
    problems = [Problem(prompt="x", answer=answer) for answer in (*good, bad, bad)]
    with RewardPool(RewardConfig(scorer, workers=1, time_limit_s=20)) as pool:
        assert unscorable_answers(pool, problems[:-2]) == []
        assert unscorable_answers(pool, problems) == [bad]
        make_reward(pool, problems, ByteTokenizer())
    (warning,) = [record.getMessage() for record in caplog.records if "reward.scorer" in record.getMessage()]
    assert f"reward.scorer = {scorer}: 2 of {len(problems)} " in warning and repr(bad) in warning


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        (r"So \boxed{3}. Wait, I made a mistake. The correct answer is \boxed{4}.", 1.0),
        (r"\boxed{4}, or rather \boxed{3}", 0.0),
        (r"\boxed{\boxed{4}}", 1.0),
        (r"\boxed{3}, \boxed{\frac{8}{2}}", 1.0),
        (r"It is \boxed{4}. No: \boxed{5", 0.0),
        (r"It is \boxed{4}. No: \boxed{4", 0.0),
        (r"\boxed{4\}", 0.0),
        (r"\boxed{3} so it is 4", 0.0),
        (r"\boxed{}", 0.0),
        (r"\boxed{4}. No: \boxed 5", 0.0),
        (r"\boxed{3} .. \boxed 4", 1.0),
        ("so it is 4", 1.0),
    ],
)
def test_row_06_the_last_complete_box_counts(completion: str, value: float) -> None:
    pytest.importorskip("math_verify")
    scorer = load_scorer("math")
    assert scorer.score(completion, "4") == value and scorer.final_answer is not None
    assert (scorer.final_answer(completion) is not None) >= bool(value)

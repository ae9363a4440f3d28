"""Faults of data that hold the same question in several rows."""

import json
from pathlib import Path

import numpy as np
import pytest

from configs.schema import DataConfig, RunConfig
from launch.data.problems import Problem, describe_leak, read_problems, split
from launch.data.prompts import Message
from launch.evaluation.report import set_report
from launch.evaluation.sampler import Sampled
from launch.evaluation.statistics import over_prompts
from launch.setup.problems import build_problems


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("rows", [(32, 32), (1, 60)], ids=["equal", "unequal"])
def test_row_35_intervals_over_repeated_questions_cover(samples: int, rows: tuple[int, int]) -> None:
    """Evaluate 200 times on 30 questions of chances with mean 0.5, each in many rows."""
    rng, inside = np.random.default_rng(0), {True: 0, False: 0}
    for _ in range(200):
        repeats = rng.integers(rows[0], rows[1] + 1, 30)
        values = rng.binomial(samples, np.repeat(rng.beta(0.5, 0.5, 30), repeats)) / samples
        questions = np.repeat([f"question {i}" for i in range(30)], repeats).tolist()
        for clustered in (True, False):
            _, low, high = over_prompts(values, questions if clustered else None)
            inside[clustered] += low <= 0.5 <= high
    assert inside[True] >= 184 and inside[False] < 120


def test_row_35_a_report_counts_questions() -> None:
    """Question a has 1 of 8 right, in spite of spaces around it; question b both. The ids are not in order."""
    problems = [Problem(prompt=prompt, answer="1") for prompt in ("a", "left out", "b", " a", "a ", "a\n")]
    right = np.array([1, 0, 1, 1, 0, 0, 0, 0, 0, 0], bool)
    ids = np.repeat(np.array([0, 2, 3, 4, 5], np.int32), 2)
    ones = np.ones(10, np.int32)
    scored = right.astype(np.float32), right
    part = Sampled(ids, ones[:, None], ones, ones > 0, ones, *scored, ones[:, None] > 0, ones * 0, ones, ones, 1.0)
    report = set_report("s", problems, [part], 2, (2,), None)
    assert (report.prompts, report.questions) == (5, 2)
    assert report.measures["accuracy"].value == pytest.approx((1 / 8 + 1) / 2)
    assert report.measures["pass@2"].value == pytest.approx((1 / 4 + 1) / 2)


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("2³", "23", False),
        ("Ab", "AB", False),
        ("if x:\n  y\nz", "if x:\n  y\n  z", False),
        ("é", "e\u0301\n", True),
    ],
)
def test_row_35_only_copies_are_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, first: str, second: str, same: bool
) -> None:
    """The last problem is held out. A leak is also warned of where only case, spaces or compatibility forms differ."""
    one, other = (Problem(prompt=prompt, answer="1") for prompt in (first, second))
    assert (one.key == other.key) == (one.question == other.question) == same
    assert describe_leak([one], [other]) is not None
    path = tmp_path / "a.jsonl"
    path.write_text(
        "\n".join(json.dumps({"question": each, "answer": i}) for i, each in enumerate(("y", first, second)))
    )
    train, _ = build_problems(RunConfig(name="x", steps=1, data=DataConfig(train=str(path), held_out_count=1)))
    assert [problem.prompt for problem in train] == ["y", first][: 1 if same else 2]
    said = "1 of 2 training problems dropped" if same else "1 of 1 held-out problems are also training problems"
    assert f"data.held_out_count = 1: {said}" in caplog.text


def test_row_35_columns_count_for_scorers_of_your_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"question": "x", "answer": 1, "test": test}) for test in (1.5, [2], 1.5)))
    for scorer, kept in (("exact", 1), ("own:scorer", 2)):
        assert len(read_problems(path, "question", "answer", distinct=True, scorers=(scorer,))) == kept
        assert f"{path}: {3 - kept} of 3 problems dropped" in caplog.text
    assert f"{path}: 1 of 3 problems kept with the prompt of an earlier one" in caplog.text


def test_row_35_problems_to_train_on_are_distinct(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The same question with another system message, or another answer, stays."""
    chats = [[{"role": "system", "content": each}, {"role": "user", "content": "x?"}] for each in ("brief", "long")]
    rows = [(" x? ", 1), ("x?", 1), ("x?", 2), (chats[0], 1), (chats[1], 1), (chats[0], 1), ("y", 1)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"question": q, "answer": a, "index": i}) for i, (q, a) in enumerate(rows)))
    data = DataConfig(train=str(path), held_out=str(path))
    problems = build_problems(RunConfig(name="x", steps=1, data=data))
    assert [problem.source for problem in problems.train] == [f"{path}:{line}" for line in (1, 3, 4, 5, 7)]
    assert problems.held_out == problems.train
    for option in ("data.train", "data.held_out"):
        assert f"{option} = {path}: 2 of 7 problems dropped" in caplog.text
        assert f"{option} = {path}: 1 of 7 problems kept with the prompt of an earlier one" in caplog.text
    assert len(read_problems(path, "question", "answer")) == 7


def asked(system: str, text: str = "Go.") -> Problem:
    return Problem(prompt=(Message("system", system), Message("user", text)), answer="1")


def test_row_68_the_whole_prompt_tells_problems_apart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Problems that differ only in their system messages all stay, and each counts in an interval."""
    problems = [asked(f"Add {i} and 1.") for i in range(50)]
    assert [len(part) for part in split(problems, 10)] == [40, 10] and not caplog.records
    assert describe_leak(problems[:40], problems[40:]) is None
    ids, ones = np.arange(50, dtype=np.int32), np.ones(50, np.int32)
    right = ids % 2 == 0
    scored = right.astype(np.float32), right
    part = Sampled(ids, ones[:, None], ones, ones > 0, ones, *scored, ones[:, None] > 0, ones * 0, ones, ones, 1.0)
    report = set_report("s", problems, [part], 1, (), None)
    _, low, high = report.measures["accuracy"]
    assert report.questions == 50 and 0.36 < low < high < 0.64
    # Roles and borders of messages are part of a prompt.
    turns = (Message("user", "a"), Message("assistant", "b"), Message("user", "c"))
    texts = [turns, (turns[0], Message("user", "b"), turns[2]), (Message("user", "a\nb\nc"),), (turns[2],)]
    assert len({Problem(prompt=prompt, answer="1").question for prompt in texts}) == 4
    assert Problem(prompt=" c", answer="1").key == Problem(prompt=texts[-1], answer="1").key


def test_row_68_what_all_problems_of_a_set_begin_with_does_not_hide_a_leak() -> None:
    train, held_out = ([asked(system, f"What is {i}?") for i in range(4)] for system in ("Be brief.", "Think."))
    for other in (held_out, [Problem(prompt=f"what is {i}?", answer="1") for i in range(4)]):
        assert (describe_leak(train, other) or "").startswith("4 of 4 held-out problems are also training problems")
    assert describe_leak(train, [asked("Think.", f"What is {i}?") for i in range(5, 9)]) is None
    assert (describe_leak(train, held_out[:1]) or "").startswith("1 of 1 held-out")
    assert describe_leak(train, [asked("Think.", "What is 9?")]) is None

"""Faults that could assign a reward to the wrong sample, or lose it."""

import datetime
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from configs.schema.rewards import RewardConfig
from launch.data.problems import Problem, read_problems
from launch.data.tokenizers import ByteTokenizer
from launch.errors import ConfigError
from launch.jobs.guarded import PRINTED_LINES
from launch.rewards.answers import Completion
from launch.rewards.host_scorer import HostScorer, as_object
from launch.rewards.reader import AnswerReader
from launch.rewards.reward_fn import make_reward, unscorable_answers
from launch.rewards.scorers import load_scorer
from launch.rewards.workers import RewardPool
from tests.launch.processes import gone
from tests.refusals import refuses

ROOT = Path(__file__).parents[2]
SCORERS = ROOT / "tests" / "launch"
TIME_LIMIT_S = 2.0


def new_pool(workers: int = 2, time_limit_s: float = TIME_LIMIT_S) -> RewardPool:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCORERS)
        return RewardPool(RewardConfig("sample_scorers:by_command", workers=workers, time_limit_s=time_limit_s))


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with new_pool() as pool:
        yield pool


def score(pool: RewardPool, *completions: str) -> list[float]:
    return pool.score(completions, [""] * len(completions))[:, 0].tolist()


def test_values_come_back_in_order(pool: RewardPool) -> None:
    values = pool.score([f"value {i / 2}" for i in range(300)], ["?"] * 300)
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values[:, 0], np.arange(300) / 2)
    assert pool.score([], []).shape == (0, 1)


@pytest.mark.parametrize("command", ["fork", "fork_raise"])
def test_row_01_a_scorer_that_forks_gets_its_own_values(pool: RewardPool, command: str) -> None:
    for _ in range(2):  # the second batch would get what the first left over
        assert score(pool, *(f"{command} {i}" for i in range(12))) == list(range(12))


HOSTILE = {
    **{text: text for text in ("raise no", "hang", "exit", "sys_exit", "interrupt", "text", "none")},
    **{text: text for text in ("value nan", "value inf", "value 1e300", "forge [0.0, 9.0]", 'forge ["9"]', "forge {}")},
    **{"scribbled text": "scribble x", "zeros": "scribble " + "\0" * 8, "object": "scribble {}"},
    "null": "scribble null",
    "foreign": "scribble [1, 0, 2, [9.0]]",
    "nested": "scribble [[1], 0, 0, [9.0]]",
    "long": "scribble " + "1" * 2**21,
    "deep": "scribble " + "[" * 10**5,
}


@pytest.mark.parametrize("command", HOSTILE.values(), ids=HOSTILE)
def test_row_01_a_scorer_that_fails_or_writes_to_the_socket_loses_one_sample(pool: RewardPool, command: str) -> None:
    start = time.monotonic()
    values = score(pool, "value 1", command, *(f"value {i}" for i in range(2, 20)))
    np.testing.assert_array_equal(values, [1, np.nan, *range(2, 20)])
    assert time.monotonic() - start < TIME_LIMIT_S + 20


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
@pytest.mark.parametrize("ending", ["worker exits", "pool closes"])
def test_row_01_no_child_of_a_scorer_outlives_its_worker(ending: str) -> None:
    with new_pool() as pool:
        children = [int(pid) for pid in score(pool, "daemon", "daemon bare", "orphan", "orphan")]
        assert not gone(children, within_s=0)
        if ending == "worker exits":
            # If one worker starts slowly, the other one may take all samples.
            assert any(score(pool, *["exit"] * 4) is not None and gone(children, within_s=2.0) for _ in range(20))
    assert gone(children, within_s=0)


def test_failures_are_logged_once_for_each_kind(caplog: pytest.LogCaptureFixture) -> None:
    with new_pool() as pool, caplog.at_level(logging.WARNING, "launch.rewards.workers"):
        score(pool, "raise one", "raise two", "text", *["interrupt"] * 8)
        score(pool, "raise three", "none")
    reasons = "raised ValueError: one", "returned str", "raised KeyboardInterrupt", "returned None"
    for record, reason in zip(caplog.records, reasons, strict=True):
        said = record.getMessage()
        assert said.startswith("reward.scorer = sample_scorers:by_command: ") and reason in said


def test_prints_are_cut_and_labelled(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    with new_pool() as pool:
        assert score(pool, *["print 10000000"] * 4) == [1.0] * 4
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == PRINTED_LINES + 1 and sum(map(len, said)) < 10_000
    assert all(line.startswith("reward.scorer = sample_scorers:by_command: print") for line in said)
    assert capfd.readouterr() == ("", "")


def test_calls_from_several_threads_keep_their_own_results(pool: RewardPool) -> None:
    def call(number: int) -> list[float]:
        return score(pool, *(f"value {number}" for _ in range(20)), "exit", f"value {number + 0.5}")

    with ThreadPoolExecutor(4) as threads:
        for number, values in enumerate(threads.map(call, range(8))):
            np.testing.assert_array_equal(values, [*[number] * 20, np.nan, number + 0.5])


def test_workers_import_neither_jax_nor_numpy_and_one_that_died_idle_costs_no_sample(pool: RewardPool) -> None:
    assert score(pool, "imported sys", "imported jax", "imported numpy") == [1.0, 0.0, 0.0]
    pids = [int(pid) for pid in set(score(pool, *["pid"] * 16))]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert gone(pids)
    assert score(pool, *["value 1"] * 16) == [1.0] * 16


def test_a_sample_that_cannot_be_sent_raises_and_blocks_nothing(pool: RewardPool) -> None:
    with pytest.raises(Exception, match="not JSON serializable"):
        pool.score([Completion("", None)], [lambda: None])  # pyright: ignore[reportArgumentType]
    assert score(pool, "value 1") == [1.0]


def test_closing_ends_the_processes_and_calls_that_wait() -> None:
    pool = new_pool(workers=1, time_limit_s=60)
    pids = [int(pid) for pid in score(pool, "pid")]
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(score, pool, "hang", "value 1")
        time.sleep(0.1)
        start = time.monotonic()
        pool.close()
        assert np.isnan(waiting.result()).all()
    assert time.monotonic() - start < 20
    assert gone(pids, within_s=0)
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        score(pool, "value 1")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and needs Linux to end a process that hangs")
@pytest.mark.parametrize("ending", ["exit", "sigkill"])
def test_no_process_outlives_the_program(ending: str) -> None:
    program = f"""
        import os, signal, sys, threading, time
        sys.path[:0] = [{str(SCORERS)!r}, {str(ROOT)!r}]
        from configs.schema.rewards import RewardConfig
        from launch.rewards.workers import RewardPool
        pool = RewardPool(RewardConfig("sample_scorers:by_command", workers=2, time_limit_s=60))
        print(*{{int(pid) for pid in pool.score(["pid"] * 64, [""] * 64)[:, 0]}})
        threading.Thread(target=pool.score, args=(["hang"], [""]), daemon=True).start()
        time.sleep(0.2)
        if {ending!r} == "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-u", "-c", textwrap.dedent(program)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    pids = [int(pid) for pid in ended.stdout.split()]
    assert pids and gone(pids)
    assert ended.returncode == (0 if ending == "exit" else -signal.SIGKILL)
    assert ended.stderr == ""


@pytest.mark.parametrize(
    ("scorer", "reason"),
    [
        *((name, "") for name in ("nonsense", "no_such_module:f", "sample_scorers:missing")),
        ("sample_scorers:NOT_A_FUNCTION", ""),
        ("exits:f", "SystemExit: 3"),
        ("interrupts:f", "KeyboardInterrupt"),
        ("dies:f", "died: its process ended, while it was imported"),
    ],
)
def test_a_scorer_without_import_is_refused(
    scorer: str, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module, line in {"exits": "exit(3)", "interrupts": "raise KeyboardInterrupt", "dies": "os._exit(0)"}.items():
        write(tmp_path / f"{module}.py", "import os", line)
    monkeypatch.syspath_prepend(SCORERS)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=f"^reward.also = {scorer}: .*{reason}"):
        RewardPool(RewardConfig("exact", also=(scorer,), workers=1, time_limit_s=1))


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_row_05_numbers_are_written_out(tmp_path: Path) -> None:
    given = {"0.00001": "0.00001", "1e16": "10000000000000000", "-2.50E-3": "-0.00250", "7": "7", "-0.0": "0"}
    path = write(tmp_path / "a.jsonl", *(f'{{"q": "x", "a": {number}, "unused": NaN}}' for number in given))
    assert [problem.answer for problem in read_problems(path, "q", "a")] == [*given.values()]


def test_row_05_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    for number in ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1e-999", "1" * 400):
        path = write(tmp_path / "a.jsonl", '{"q": "x", "a": 1}', f'{{"q": "x", "a": {number}}}')
        with refuses("/...a.jsonl:2: field 'a'", ConfigError):
            read_problems(path, "q", "a")


@pytest.mark.parametrize(("scorer", "good"), [("math", ["0.00001", "\\frac{1}{2}", "70,000"]), ("exact", ["7", "a b"])])
def test_row_05_unscorable_answers_are_counted(scorer: str, good: list[str], caplog: pytest.LogCaptureFixture) -> None:
    if scorer == "math":
        pytest.importorskip("math_verify")
    bad = "four{" if scorer == "math" else "#4"
    problems = [Problem(prompt="x", answer=answer) for answer in (*good, bad, bad)]
    with RewardPool(RewardConfig(scorer, workers=1, time_limit_s=20)) as pool:
        assert unscorable_answers(pool, problems[:-2]) == ([], [])
        assert unscorable_answers(pool, problems) == ([bad], [])
        make_reward(pool, problems, ByteTokenizer())
    (warning,) = [record.getMessage() for record in caplog.records if "reward.scorer" in record.getMessage()]
    assert f"reward.scorer = {scorer}: 2 of {len(problems)} " in warning and repr(bad) in warning


@pytest.mark.parametrize(
    ("completion", "answer", "value"),
    [
        (r"So \boxed{3}. Wait, I made a mistake. The correct answer is \boxed{4}.", "4", 1.0),
        (r"\boxed{4}, or rather \boxed{3}", "4", 0.0),
        (r"\boxed{\boxed{4}}", "4", 1.0),
        (r"\boxed{3}, \boxed{\frac{8}{2}}", "4", 1.0),
        (r"It is \boxed{4}. No: \boxed{5", "4", 0.0),
        (r"It is \boxed{4}. No: \boxed{4", "4", 0.0),
        (r"\boxed{4\}", "4", 0.0),
        (r"\boxed{3} so it is 4", "4", 0.0),
        (r"\boxed{}", "4", 0.0),
        (r"\boxed{4}. No: \boxed 5", "4", 0.0),
        (r"\boxed{3} .. \boxed 4", "4", 1.0),
        ("so it is 4", "4", 1.0),
        (r"<think>$3$</think> The answer is $\frac{1}{2}$.", "0.5", 1.0),
        ("#### 70000", "70,000", 1.0),
        (r"\boxed{033}", "33", 1.0),
        ("", "18", 0.0),
    ],
)
def test_row_06_the_last_complete_box_counts(completion: str, answer: str, value: float) -> None:
    pytest.importorskip("math_verify")
    scorer = load_scorer("math")
    assert scorer.score(completion, answer) == value and scorer.final_answer is not None
    assert (scorer.final_answer(completion) is not None) >= bool(value)


def test_final_answers_of_math_are_the_same_for_equal_values() -> None:
    pytest.importorskip("math_verify")
    scorer = load_scorer("math")
    with pytest.raises(ValueError, match="cannot read the answer ''"):
        scorer.score(r"\boxed{18}", "")
    final = scorer.final_answer
    assert final is not None and final("no idea") is None
    assert final(r"so \boxed{\frac{1}{2}}") == final(r"hence \boxed{\frac12}.") == final("It is $1/2$") is not None
    for texts in (("2", "2.0"), ("0.5", r"\frac{1}{2}", r"50\%"), (r"\sqrt{12}", r"2\sqrt{3}"), ("2^{10}", "2^{10}")):
        assert len({final(rf"\boxed{{{text}}}") for text in texts}) == 1
    assert final("The answer is 1,000.") == final(r"\boxed{1000}") != final(r"\boxed{100}")


def test_row_48_a_scorer_that_fails_at_import_is_named_with_its_option(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write(tmp_path / "exits_0.py", "import os", "print('x' * 10**6)", "os._exit(0)")
    write(tmp_path / "good.py", "def f(completion, answer): return 1.0")
    monkeypatch.syspath_prepend(tmp_path)
    for names, option in ((("exits_0:f", "exact"), "scorer"), (("good:f", "exits_0:f"), "also")):
        with refuses(f"reward.{option} = exits_0:f: died: its process ended, while it was imported", ConfigError):
            RewardPool(RewardConfig(names[0], also=names[1:], workers=2))


def test_row_48_interrupts_and_output_are_shown_once(caplog: pytest.LogCaptureFixture) -> None:
    with new_pool() as pool:
        assert np.isnan(score(pool, *["interrupt"] * 40)).all()
        assert score(pool, *[f"print {10**6}"] * 4) == [1.0] * 4
    assert sum("KeyboardInterrupt" in record.message for record in caplog.records) == 1
    assert len(caplog.records) == 1 + PRINTED_LINES + 1 and "prints more" in caplog.records[-1].message
    assert all("reward.scorer = sample_scorers:by_command" in record.message for record in caplog.records)


SCORER = """
def whole(completion, problem):
    assert problem["answer"] == {answer!r}
    assert problem["prompt"] == {prompt!r}
    return float(completion in problem["columns"]["accepted"]["words"]) + problem["columns"]["bonus"]
def text(completion, answer):
    return float(answer == {answer!r})
"""


@pytest.mark.parametrize(
    ("answer", "text"), [("7", "7"), ({"a": [1, 2.5]}, '{"a": [1, 2.5]}'), ([["x", "ü"]], '[["x", "ü"]]')]
)
def test_row_52_a_scorer_may_take_the_whole_problem(
    answer: object, text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prompt, module = [{"role": "user", "content": "say hi"}], f"whole_{len(text)}"
    row = {"prompt": prompt, "answer": answer, "accepted": {"words": ["hi", "hello"]}, "bonus": 0.25, "none": None}
    path = write(tmp_path / "a.jsonl", json.dumps(row))
    write(tmp_path / f"{module}.py", SCORER.format(answer=text, prompt=prompt))
    monkeypatch.syspath_prepend(tmp_path)
    config = RewardConfig(f"{module}:whole", also=(f"{module}:text",), workers=1)
    problems = read_problems(path, "prompt", "answer", scorers=config.names)
    tokens, tokenizer = np.zeros((2, 3), np.int32), ByteTokenizer()
    for line, completion in zip(tokens, ("hi", "no"), strict=True):
        line[:2] = tokenizer.encode(completion)
    with RewardPool(config) as pool:
        (_, _, values) = HostScorer(pool, AnswerReader(pool.rule, tokenizer, problems), pool.config)(
            tokens, np.array([2, 2]), np.array([0, 0])
        )
    assert values.tolist() == [[1.25, 1.0], [0.25, 1.0]]
    # It also gets the problem when answers are checked.
    with RewardPool(RewardConfig("exact", also=(f"{module}:whole",), workers=1)) as pool:
        assert unscorable_answers(pool, problems) == ([], [])


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("text", "reward.scorer = sample_scorers:by_command: returned str: '1.0'; must return a number"),
        *((answer, None) for answer in ("none", "raise no", "value 2", "exit")),
    ],
)
def test_a_scorer_that_returns_text_is_refused(pool: RewardPool, answer: str, message: str | None) -> None:
    """It gets the answer as a made-up completion."""
    with nullcontext() if message is None else refuses(message):
        make_reward(pool, [Problem(prompt="", answer=answer)], ByteTokenizer())


def test_row_52_objects_are_answers_only_of_scorers_of_ones_own(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"q": "x", "a": {"b": 1}}')
    for names in ((), ("exact",), ("math", "my:scorer")):
        with refuses("/...a.jsonl:1: field 'a' must be text or a number", ConfigError):
            read_problems(path, "q", "a", scorers=names)
    with refuses("/...a.jsonl:1: field 'a' must be text or a number", ConfigError):
        read_problems(path, "q", "a", answer_after="#", scorers=("my:scorer",))
    assert read_problems(path, "q", "a", scorers=("my:scorer",))[0].answer == '{"b": 1}'
    assert not read_problems(path, "q", "a.b", scorers=("exact",))[0].columns


def test_row_52_columns_of_any_type_reach_the_scorer() -> None:
    columns = {"x": Decimal("1.5"), "y": np.arange(2), "z": datetime.date(2026, 1, 2), "n": float("nan"), "b": b"x"}
    sent = as_object(Problem(prompt="p", answer="1", columns=columns))["columns"]
    assert (sent["x"], sent["y"], sent["z"], str(sent["n"]), sent["b"]) == (1.5, [0, 1], "2026-01-02", "nan", "b'x'")

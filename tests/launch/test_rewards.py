import logging
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.schema.rewards import LengthConfig, RewardConfig
from launch.cli.errors import ConfigError
from launch.cli.options import parse_run
from launch.data.problems import Problem
from launch.data.tokenizers import ByteTokenizer
from launch.rewards.pool import RewardPool
from launch.rewards.reward_fn import final_answer_of, host_scorer, length_penalty
from launch.rewards.scorers import load_scorer
from specjax.rewards import HostScore
from tests.launch.processes import gone

HERE = Path(__file__).parent
TIME_LIMIT_S = 2.0


@pytest.fixture(scope="module")
def pool():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(HERE)
        with RewardPool(RewardConfig("sample_scorers:by_command", workers=2, time_limit_s=TIME_LIMIT_S)) as pool:
            yield pool


def score(pool: RewardPool, *completions: str) -> list[float]:
    return pool.score(completions, [""] * len(completions))[:, 0].tolist()


def test_values_come_back_in_order(pool: RewardPool):
    values = pool.score([f"value {i / 2}" for i in range(300)], ["?"] * 300)
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values[:, 0], np.arange(300) / 2)
    assert pool.score([], []).shape == (0, 1)


def test_failures_lose_only_their_own_sample(pool: RewardPool):
    failing = ["raise no", "hang", "exit", "text", "none", "value nan", "value inf", "value 1e300"]
    completions, start = [text for failure in failing for text in (failure, "value 1")], time.monotonic()
    values = score(pool, *completions)
    assert TIME_LIMIT_S <= time.monotonic() - start < TIME_LIMIT_S + 20  # of the one that hangs
    assert np.isnan(values[::2]).all()
    assert values[1::2] == [1.0] * len(failing)


def test_reasons_are_logged_once(pool: RewardPool, caplog: pytest.LogCaptureFixture):
    pool._reported.clear()
    with caplog.at_level(logging.WARNING, "launch.rewards.pool"):
        score(pool, "raise one", "raise two", "text")
        score(pool, "raise three", "none")
    assert len(caplog.records) == 3
    for record, reason in zip(caplog.records, ("ValueError: one", "returned str", "returned NoneType"), strict=True):
        assert reason in record.getMessage()


def test_calls_from_several_threads_keep_their_own_results(pool: RewardPool):
    def call(number: int) -> list[float]:
        return score(pool, *(f"value {number}" for _ in range(20)), "exit", f"value {number + 0.5}")

    with ThreadPoolExecutor(4) as threads:
        for number, values in enumerate(threads.map(call, range(8))):
            assert values[:20] == [number] * 20
            assert np.isnan(values[20])
            assert values[21] == number + 0.5


def test_workers_import_neither_jax_nor_numpy(pool: RewardPool):
    assert score(pool, "imported sys", "imported jax", "imported numpy") == [1.0, 0.0, 0.0]


def test_a_worker_that_died_idle_costs_no_sample(pool: RewardPool):
    pids = [int(pid) for pid in set(score(pool, *["pid"] * 16))]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert gone(pids)
    assert score(pool, *["value 1"] * 16) == [1.0] * 16


def test_a_sample_that_cannot_be_sent_raises_and_blocks_nothing(pool: RewardPool):
    with pytest.raises(Exception, match="not JSON serializable"):
        pool.score([lambda: None], [""])  # pyright: ignore[reportArgumentType]
    assert score(pool, "value 1") == [1.0]


def test_closing_ends_the_processes_and_calls_that_wait():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(HERE)
        pool = RewardPool(RewardConfig("sample_scorers:by_command", workers=1, time_limit_s=60))
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
def test_no_process_outlives_the_program(ending: str):
    program = f"""
        import os, signal, sys, threading, time
        sys.path[:0] = [{str(HERE)!r}, {str(HERE.parent.parent)!r}]
        from configs.schema.rewards import RewardConfig
        from launch.rewards.pool import RewardPool
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
    "scorer", ["nonsense", "no_such_module:f", "sample_scorers:missing", "sample_scorers:NOT_A_FUNCTION"]
)
def test_a_scorer_that_cannot_be_imported_is_a_config_error(scorer: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(HERE)
    with pytest.raises(ConfigError, match=f"reward.scorer = {scorer}: "):
        RewardPool(RewardConfig("exact", also=(scorer,), workers=1, time_limit_s=1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(workers=0), "workers = 0: "),
        (dict(time_limit_s=0.0), "time_limit_s = 0.0: "),
        (dict(time_limit_s=float("nan")), "time_limit_s = nan: "),
        (dict(scorer="length"), "scorer = length: "),
        (dict(also=("math", "exact")), "also = ('math', 'exact'): "),
        (dict(also=("exact_traced",)), "also = ('exact_traced',), weights = (): "),
        (dict(scorer="exact_traced", weights=(2.0,)), "weights = (2.0,): "),
        (dict(also=("format",), weights=(1.0,)), "weights = (1.0,): "),
        (dict(weights=(float("inf"),)), "weights = (inf,): "),
        (dict(scorer="regex"), "pattern = None: "),
        (dict(pattern="x"), "pattern = x: "),
        (dict(scorer="regex", pattern="("), "pattern = (: "),
        (dict(format="*"), "format = *: "),
        (dict(also=("length",)), "length.most = None: "),
        (dict(length=(3, 2)), "least = 3: must be at most most = 2"),
    ],
)
def test_invalid_rewards_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        RewardConfig(length=LengthConfig(*options.pop("length", ())), **options)


def test_rewards_on_the_command_line():
    options = "--reward.scorer regex --reward.pattern #(.*) --reward.also format length my.own:scorer"
    more = "--reward.weights 1 0.5 0.25 -1 --reward.length.most 100 --reward.length.slack 20"
    reward = parse_run(["gsm8k", *options.split(), *more.split()], "", "").reward
    assert reward.names == ("regex", "format", "length", "my.own:scorer") and reward.weights == (1, 0.5, 0.25, -1)
    assert reward.parts == ("regex", "format", "length", "my.own.scorer")
    assert (reward.pattern, reward.length) == ("#(.*)", LengthConfig(0, 100, 20))


@pytest.mark.parametrize(
    ("name", "pattern", "completion", "value", "final"),
    [
        ("exact", None, "#3 no, # 18\n", 1, "18"),
        ("exact", None, "#18 #3", 0, "3"),
        ("exact", None, "18", 0, None),
        ("regex", r"answer is (\d+)", "answer is 3, no: answer is 18", 1, "18"),
        ("regex", r"answer is (\d+)", "answer is 18, no: answer is 3", 0, "3"),
        ("regex", r"answer is (\d+)", "18", 0, None),
        ("regex", r"<answer>(.*?)</answer>", "<answer> 18 </answer>", 1, "18"),
        ("regex", r"\[(.*)\]|\((.*)\)", "(18)", 1, "18"),
        ("regex", r"^(?s:.)*\Z(18)?", "18", 0, ""),
        ("regex", r"(?i)the end", "This is The End.", 1, ...),
        ("regex", r"the end", "", 0, ...),
        ("format", RewardConfig().format, "<think>\nso\n</think>\n18", 1, ...),
        ("format", RewardConfig().format, "<think>so</think> ", 0, ...),
        ("format", RewardConfig().format, "well <think>so</think>18", 0, ...),
    ],
)
def test_scores_and_final_answers(name: str, pattern: str | None, completion: str, value: float, final: object):
    """`...`: the scorer has no `final_answer`."""
    scorer = load_scorer(name, pattern)
    assert scorer.score(completion, "18") == value
    assert (... if scorer.final_answer is None else scorer.final_answer(completion)) == final


def test_final_answers_of_a_run(monkeypatch: pytest.MonkeyPatch):
    """The traced scorer has those of `exact`. A custom scorer's are given by a function in its module."""
    monkeypatch.syspath_prepend(HERE)
    assert final_answer_of(RewardConfig("sample_scorers:by_answer")) is None
    traced = final_answer_of(RewardConfig("exact_traced"))
    assert traced is not None and traced("1+2=3\n#3") == "3"
    monkeypatch.setattr("sample_scorers.final_answer", int, raising=False)
    own = final_answer_of(RewardConfig("sample_scorers:by_answer"))
    assert own is not None and own("3") == 3 and own("three") is None


def test_lengths_are_free_within_bounds_and_cost_up_to_one_outside():
    overlong = length_penalty(np.array([0, 100, 105, 110, 1000]), LengthConfig(0, 100, 10))
    np.testing.assert_array_equal(overlong, [0, 0, -0.5, -1, -1])
    target = length_penalty(np.array([0, 10, 15, 20, 25, 40]), LengthConfig(20, 20, 10))
    np.testing.assert_array_equal(target, [-1, -1, -0.5, 0, -0.5, -1])


def test_math_answers():
    pytest.importorskip("math_verify")
    cases = [
        (r"so it is \boxed{18}", "18", 1.0),
        (r"<think>$3$</think> The answer is $\frac{1}{2}$.", "0.5", 1.0),
        ("#### 70000", "70,000", 1.0),
        (r"\boxed{033}", "33", 1.0),
        (r"\boxed{19}", "18", 0.0),
        ("", "18", 0.0),
        (r"\boxed{18}", "", np.nan),
    ]
    completions, answers, expected = zip(*cases, strict=True)
    with RewardPool(RewardConfig("math", workers=1, time_limit_s=20)) as pool:
        np.testing.assert_array_equal(pool.score(completions, answers)[:, 0], np.asarray(expected))
    final = load_scorer("math").final_answer
    assert final is not None and final("no idea") is None
    assert final(r"so \boxed{\frac{1}{2}}") == final(r"hence \boxed{\frac12}.") == final("It is $1/2$") is not None
    assert final("The answer is 1,000.") == final(r"\boxed{1000}") != final(r"\boxed{100}")


@contextmanager
def scoring(config: RewardConfig) -> Iterator[HostScore]:
    """Return a host scorer for four problems, whose answers are their ids."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(HERE)
        with RewardPool(config) as pool:
            yield host_scorer(pool, ByteTokenizer(), [Problem(prompt="", answer=str(i)) for i in range(4)])


def rows(*completions: str) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and lengths. Lengths include the stop token."""
    tokens = np.zeros((len(completions), 12), np.int32)
    for row, text in zip(tokens, completions, strict=True):
        row[: len(text) + 1] = [*text.encode(), 256]
    return tokens, np.asarray([len(text) + 1 for text in completions], np.int32)


def test_completions_are_scored_against_the_answer_of_their_id():
    """Only tokens within the length count, and padding rows are skipped."""
    with scoring(RewardConfig("exact", workers=1, time_limit_s=20)) as exact:
        tokens, lengths = rows("1+1=2;#2", "#2", "#3", "#0", "", "#2#3")
        lengths[5] -= 3
        value, correct = exact(tokens, lengths, np.asarray([2, 3, 3, -1, 0, 2], np.int32))
        assert value.dtype == correct.dtype == np.float32
        np.testing.assert_array_equal(value, [1, 0, 1, np.nan, 0, 1])
        np.testing.assert_array_equal(correct, [1, 0, 1, 0, 0, 1])


def test_several_scorers_are_summed():
    """Only the first decides what is correct. If one fails, the sample is lost. Lengths include the stop token."""
    also = "sample_scorers:before_the_mark", "length"
    with scoring(RewardConfig("exact", also, (1.0, 0.5, 2.0), length=LengthConfig(0, 4, 4), workers=1)) as summed:
        tokens, lengths = rows("7#1", "7#2", "99999#2", "nan#2", "x#2", "1#2")
        value, correct, said = summed(tokens, lengths, np.asarray([2, 2, 2, 2, 2, -1], np.int32))
    none = [np.nan] * 3
    expected = [[0, 7, 0], [1, 7, 0], [1, 99999, -1], [1, np.nan, -0.5], [np.nan, np.nan, 0], none]
    np.testing.assert_array_equal(said, np.asarray(expected, np.float32))
    np.testing.assert_array_equal(value, np.asarray([3.5, 4.5, 49998.5, np.nan, np.nan, np.nan], np.float32))
    np.testing.assert_array_equal(correct, [0, 1, 1, 1, 0, 0])

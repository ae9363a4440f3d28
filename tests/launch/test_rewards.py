import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.schema.rewards import LengthConfig, RewardConfig
from launch.cli.options import parse_run
from launch.data.problems import Problem
from launch.data.tokenizers import ByteTokenizer
from launch.errors import ConfigError
from launch.rewards.host_scorer import HostScorer, length_penalty
from launch.rewards.reader import AnswerReader
from launch.rewards.reward_fn import final_answer_of, function_reward
from launch.rewards.scorers import load_scorer
from launch.rewards.workers import RewardPool
from specjax.rewards import HostScore
from tests.refusals import refuses

HERE = Path(__file__).parent
TIME_LIMIT_S = 2.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(workers=0), "workers = 0: "),
        (dict(time_limit_s=0.0), "time_limit_s = 0.0: "),
        (dict(scorer="length"), "scorer = length: "),
        (dict(also=("math", "exact")), "also = ('math', 'exact'): "),
        (dict(also=("exact_traced",)), "also = ('exact_traced',), weights = (): "),
        (dict(scorer="exact_traced", weights=(2.0,)), "weights = (2.0,): "),
        (dict(also=("format",), weights=(1.0,)), "weights = (1.0,): "),
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


@contextmanager
def scoring(config: RewardConfig) -> Iterator[HostScore]:
    """Return a host scorer for four problems, whose answers are their ids."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(HERE)
        with RewardPool(config) as pool:
            yield HostScorer(
                pool,
                AnswerReader(pool.rule, ByteTokenizer(), [Problem(prompt="", answer=str(i)) for i in range(4)]),
                pool.config,
            )


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
    """Only the first decides what is correct. If one fails, the sample is lost and wrong. Lengths include the stop."""
    also = "sample_scorers:before_the_mark", "length"
    with scoring(RewardConfig("exact", also, (1.0, 0.5, 2.0), length=LengthConfig(0, 4, 4), workers=1)) as summed:
        tokens, lengths = rows("7#1", "7#2", "99999#2", "nan#2", "x#2", "1#2")
        value, correct, said = summed(tokens, lengths, np.asarray([2, 2, 2, 2, 2, -1], np.int32))
    none = [np.nan] * 3
    expected = [[0, 7, 0], [1, 7, 0], [1, 99999, -1], [1, np.nan, -0.5], [np.nan, np.nan, 0], none]
    np.testing.assert_array_equal(said, np.asarray(expected, np.float32))
    np.testing.assert_array_equal(value, np.asarray([3.5, 4.5, 49998.5, np.nan, np.nan, np.nan], np.float32))
    np.testing.assert_array_equal(correct, [0, 1, 1, 0, 0, 0])


def test_a_function_of_this_process_loses_samples_and_logs_each_kind_once(caplog: pytest.LogCaptureFixture) -> None:
    def reward(completion: str, problem: dict[str, Any]) -> float:
        if completion.isdigit():
            return float(completion) / float(problem["answer"])
        raise KeyError(completion) if completion == "k" else ValueError(f"{completion}\n" + "x" * 1000)

    tokens = np.array([[ord(character)] for character in "4abk8"], np.int32)
    score = function_reward(reward, [Problem(prompt="", answer="4")], ByteTokenizer()).score
    values, correct = score(tokens, np.ones(5, np.int32), np.array([0, 0, 0, 0, -1]))
    np.testing.assert_array_equal(values, [1, *[np.nan] * 4])
    assert correct.tolist() == [1, 0, 0, 0, 0]
    said = [record.getMessage().partition(" has no reward: ")[2] for record in caplog.records]
    counted = "(shown once; the metric reward/failed counts them)"
    assert said == [f"ValueError: a {counted}", f"KeyError: 'k' {counted}"]


@pytest.mark.parametrize(
    ("returned", "value", "said"),
    [
        (np.float32(0.5), 0.5, None),
        (np.array(0.5), 0.5, None),
        (np.bool_(True), 1.0, None),
        (True, 1.0, None),
        (None, None, "returned None"),
        ("0.5", None, "returned str: '0.5'; must return a number, True or False, or None for no reward"),
        ([1.0], None, "returned list: [1.0]; must return a number"),
        (np.array([1.0]), None, "returned ndarray: array([1.]); must"),
        ({"reward": 1}, None, "returned dict: {'reward': 1}; must"),
    ],
)
def test_what_a_function_may_return(
    returned: Any, value: float | None, said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Another type is refused before the run begins, unless the function does not get so far on made-up text."""
    problems = [Problem(prompt="", answer="made up")]

    def reward(completion: str, answer: str) -> Any:
        return 1 // 0 if completion == answer else returned

    score = function_reward(reward, problems, ByteTokenizer()).score
    (found,), _ = score(np.array([[ord("a")]], np.int32), np.ones(1, np.int32), np.zeros(1, np.int32))
    np.testing.assert_array_equal(found, np.float32(np.nan if value is None else value))
    assert not caplog.records if said is None else said in caplog.text
    if said is None or returned is None:
        function_reward(lambda completion, answer: returned, problems, ByteTokenizer())
        return
    with refuses(f"reward = <lambda>: {said}", ConfigError):
        function_reward(lambda completion, answer: returned, problems, ByteTokenizer())

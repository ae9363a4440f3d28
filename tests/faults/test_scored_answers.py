"""Faults of what is scored: thinking in place of the answer, another value, or a parameter that gets another text."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from configs.schema import DataConfig, EnvironmentConfig, RewardConfig, RolloutOptions, RunConfig
from launch.cli.recipes import load_recipe
from launch.data.arithmetic import ALPHABET
from launch.data.problems import Problem
from launch.data.stop_strings import find_stop_strings
from launch.data.tokenizers import ByteTokenizer, CharacterTokenizer, HuggingFaceTokenizer, Tokenizer
from launch.environments.parts import conversation_text
from launch.errors import ConfigError
from launch.evaluation.one_prompt import answer_text
from launch.evaluation.report import set_report
from launch.evaluation.sampler import Sampled
from launch.evaluation.sets import completion_records
from launch.rewards.answers import AnswerRule, Completion
from launch.rewards.host_scorer import HostScorer
from launch.rewards.reader import AnswerReader, answer_rule
from launch.rewards.reward_fn import final_answers, function_reward, make_reward
from launch.rewards.scorers import scorer_of
from launch.rewards.thinking import describe_thinking
from launch.rewards.workers import RewardPool
from launch.run.first_problem import describe_first_problem
from launch.setup.problems import Problems, build_tokenizer
from specjax.rewards import RewardFn
from specjax.types import Ending, Prompts, Reward, Rollout
from tests.faults.test_tokens import tagged  # noqa: F401, a fixture
from tests.launch.tokenizer_files import change, write_word_tokenizer
from tests.refusals import refuses

TAGS = "<think>", "</think>"
PROBLEM = Problem(prompt="hello", answer="4")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_word_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("text", "opened", "answer"),
    [
        (r"<think>Is it \boxed{4}? Let me check", False, None),
        (r"Is it \boxed{4}? Let me check", True, None),
        (r"<think>\boxed{3}</think>\n".replace(r"\n", "\n\n") + r"\boxed{4}", False, r"\boxed{4}"),
        (r"\boxed{3}</think>It is 4.", True, "It is 4."),
        ("no thinking at all", False, "no thinking at all"),
        ("<think>a</think>4<think>or 5", False, None),
        ("<think>a</think>3<think>b</think>4", False, "4"),
        ("<think>a</think>", False, ""),
        ("", True, None),
        ("", False, ""),
        ("<think>a</think>4</answer> and </answer>", False, "4"),
        ("<think>a</answer>b</think>4", False, None),
    ],
)
def test_row_67_the_answer_comes_after_thinking_and_before_a_stop_string(
    text: str, opened: bool, answer: str | None
) -> None:
    rule = AnswerRule(TAGS, ("</answer>", "never"))
    assert rule.answer_in(text, opened) == answer
    assert AnswerRule().answer_in(text) == text
    assert rule.opened_by("<think>a</think>b<|bot|><think>\nOkay, so")
    assert rule.opened_by("hello<|bot|><think>\n") and not rule.opened_by("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("scorer", ["math", "exact", "regex"])
def test_row_67_accuracy_majority_and_samples_count_answers_alone(scorer: str) -> None:
    """A box that is named while thinking, and cut off, earns nothing and does not vote."""
    if scorer == "math":
        pytest.importorskip("math_verify")
    state: Callable[[str], str] = r"\boxed{{{}}}".format if scorer == "math" else "#{}".format
    reward = RewardConfig(scorer, thinking=TAGS, pattern=r"#(\d+)" if scorer == "regex" else None, workers=1)
    config, tokenizer = RunConfig(name="x", steps=1, reward=reward), ByteTokenizer()
    cut, wrong, right = (
        f"<think>{state('4')}? Let me",
        f"{state('4')}</think>{state('5')}",
        f"<think></think>{state('4')}",
    )
    completions = [tokenizer.encode(text) for text in (cut, wrong, right)]
    lengths, ids = np.array(list(map(len, completions))), np.zeros(3, np.int32)
    tokens = np.zeros((3, max(lengths)), np.int32)
    for row, each in zip(tokens, completions, strict=True):
        row[: len(each)] = each
    with RewardPool(reward) as pool:
        value, correct = HostScorer(pool, AnswerReader(pool.rule, tokenizer, [PROBLEM]), pool.config)(
            tokens, lengths, ids
        )
        assert pool.score([cut, wrong, right], ["4"] * 3)[:, 0].tolist() == value.tolist() == [0, 0, 1]
    final = final_answers(config, tokenizer, [PROBLEM])
    assert final is not None and [final(each, 0) for each in completions] == [None, "5", "4"]
    turns = np.ones_like(tokens, bool), np.zeros(3, np.int8), lengths, value
    part = Sampled(ids, tokens, lengths, lengths > 0, lengths, value, correct > 0, *turns, 1.0)
    saved = list(completion_records("s", part, tokenizer, final))
    assert [record["extracted"] for record in saved] == [None, "5", "4"] and saved[0]["completion"] == cut
    # What was observed is no answer, and is shown apart.
    observed = part._replace(sampled=np.arange(tokens.shape[1]) != np.full((3, 1), tokens.shape[1] - 1))
    answered = observed._replace(ending=np.full(3, Ending.STOP, np.int8), lengths=np.full(3, tokens.shape[1]))
    for record, kept in zip(completion_records("s", answered, tokenizer, final), tokens[:, :-1], strict=True):
        assert record["completion"] == tokenizer.decode(kept.tolist()) and record["ending"] == "stop"
        assert [kind for kind, _ in record["parts"]] == ["sampled", "observed"]
    # The cut one does not vote: among 5 and 4 there is a tie.
    assert set_report("s", [PROBLEM], [part], 3, (3,), final).measures["majority@3"].value == 0.5


def test_row_67_markers_count_where_they_are_special_tokens_and_in_the_prompt(tagged: Path) -> None:  # noqa: F811
    """`decode` cuts <think> (4) and </think> (10)."""
    change(tagged / "tokenizer_config.json", chat_template="{{ messages[0].content }} <bot> <think>")
    for kept in (False, True):
        tokenizer = HuggingFaceTokenizer(tagged, keep_special_tokens=kept)
        plain = HuggingFaceTokenizer(tagged, template_kwargs={"chat_template": "{{ messages[0].content }} <bot>"})
        opening, starting = (AnswerReader(AnswerRule(TAGS), each, [PROBLEM]) for each in (tokenizer, plain))
        assert opening.read([5, 6], 0).answer is None and starting.read([5, 6], 0).answer == "hello world"
        assert starting.read([4, 5, 6], 0).answer is None
        for reader in (opening, starting):
            assert reader.read([4, 5, 10, 6, 0], 0).answer == reader.read([5, 10, 6], 0).answer == "world"
        text = "<think> hello </think> world" if kept else "hello world"
        assert opening.read([4, 5, 10, 6, 0], 0).text == text


def test_row_67_a_template_that_thinks_is_told_where_thinking_is_scored(tagged: Path) -> None:  # noqa: F811
    def said(template: str, **reward: Any) -> str:
        change(tagged / "tokenizer_config.json", chat_template=template)
        config = RunConfig(name="x", steps=1, data=DataConfig(), reward=RewardConfig(**reward))
        return describe_thinking(config, HuggingFaceTokenizer(tagged), [PROBLEM]) or ""

    thinks = "{{ messages[0].content }} <bot> {% if think is defined %}<think> </think>{% endif %}"
    assert said(thinks).startswith("reward.thinking = (): the chat template has the model think between <think>")
    assert said(thinks).endswith("--reward.thinking '<think>' '</think>' leaves it out")
    assert "--reward.scorer exact --reward.thinking" in said(thinks, scorer="exact_traced")
    assert said(thinks.replace("think>", "thinking>"), thinking=TAGS).startswith("reward.thinking = ('<think>'")
    assert not said(thinks, thinking=TAGS)
    assert not said("{{ messages[0].content }} <bot> <think> </think>")  # turned off
    assert not said("{{ messages[0].content }} <bot>")


def test_row_67_recipes_that_think_leave_it_out_and_contradictions_are_refused() -> None:
    for name in ("qwen3_8b_rl_think", "qwen3_8b_rl_zero", "own_data", "gsm8k"):
        assert load_recipe(name).reward.thinking == TAGS
    for options, message in (
        (dict(thinking=("<think>",)), "thinking = ('<think>',): must be empty, or two different texts"),
        (dict(thinking=("a", "a")), "thinking = ('a', 'a'): must be empty"),
        (dict(scorer="exact_traced", thinking=TAGS), "thinking = ...: must be empty with exact_traced"),
        (dict(scorer="regex", pattern=r"\</think\>(\d)", thinking=TAGS), "pattern = ...: must not have </think>"),
    ):
        with refuses(message, ValueError):
            RewardConfig(**options)


def ends_with_a_stop(rollout: Rollout, prompts: Prompts) -> Reward:
    last = jnp.take_along_axis(rollout.tokens, rollout.lengths[:, None] - 1, axis=1)[:, 0]
    stops = (last == ByteTokenizer().stop_tokens[0]).astype(jnp.float32)
    return Reward(value=stops, correct=stops)


def test_row_67_the_first_problem_is_shown_as_it_is_asked_and_scored() -> None:
    def shown(reward: RewardConfig, tokenizer: Tokenizer, reward_fn: RewardFn) -> list[str]:
        first = PROBLEM if isinstance(tokenizer, ByteTokenizer) else problems[0]
        both = Problems([first, Problem(prompt="x", answer="7")], [])
        config: Any = RunConfig(name="x", steps=1, reward=reward)
        experiment: Any = SimpleNamespace(config=config, tokenizer=tokenizer, problems=both)
        asked, *rows = describe_first_problem(experiment, reward_fn)
        assert "hello" in asked or "1+3=" in asked
        return [" ".join(row.split()) for row in rows[2:]]

    def strict(completion: str, answer: str) -> float:
        return float(completion[-1:] == "}") if completion else 1 / 0

    def unfinished(completion: str, answer: str) -> float:
        return {}[answer]

    sums, problems = CharacterTokenizer(ALPHABET), [Problem(prompt="1+3=", answer="4")]
    for thinking, cut_off in ((TAGS, "0"), ((), "1")):
        reward = RewardConfig("regex", pattern=r"boxed{(\d)}", thinking=thinking, workers=1)
        with RewardPool(reward) as pool:
            assert shown(reward, ByteTokenizer(), make_reward(pool, [PROBLEM], ByteTokenizer())) == [
                *(r"its answer \boxed{4} 1", r"another answer \boxed{7} 0", "nothing 0"),
                rf"cut off while thinking <think>So it is \boxed{{4}}? Let me {cut_off}",
            ]
    rows = shown(RewardConfig("python:strict"), ByteTokenizer(), function_reward(strict, [PROBLEM], ByteTokenizer()))
    assert [row.split()[-1] for row in rows[:2]] == ["1", "1"] and "nothing none: ZeroDivisionError" in rows[2]
    with refuses(
        "reward.scorer = python:unfinished: scores no completion...KeyError...must return a number", ConfigError
    ):
        shown(
            RewardConfig("python:unfinished"), ByteTokenizer(), function_reward(unfinished, [PROBLEM], ByteTokenizer())
        )
    # A completion that is cut off has no stop token.
    with_stop = [row.split()[-1] for row in shown(RewardConfig(), ByteTokenizer(), ends_with_a_stop)]
    assert with_stop == ["1", "1", "1", "0"]
    traced = make_reward(None, problems, sums)
    assert shown(RewardConfig("exact_traced"), sums, traced) == ["its answer #4 1", "another answer #7 0", "nothing 0"]


def test_row_67_scorers_of_ones_own_get_the_answer_and_the_whole_text() -> None:
    def reward(completion: str, problem: dict[str, Any], *, whole_text: str, scale: float = 1.0) -> float:
        return scale * (10 * len(completion) + len(whole_text) + float(problem["answer"]) / 10)

    score = function_reward(reward, [PROBLEM], ByteTokenizer(), TAGS).score
    for text, expected in (("<think></think>abc", 48.4), ("<think>abc", 10.4), ("abc", 33.4)):
        tokens = np.array([list(text.encode())], np.int32)
        (value,), _ = score(tokens, np.array([len(text)]), np.array([0]))
        assert value == np.float32(expected)


def test_stop_strings_within_an_answer_of_several_turns_are_kept() -> None:
    text = "</a>ask</a>4"
    assert AnswerRule((), ("</a>",)).answer_in(text) == "" and AnswerRule((), ("</a>",), True).answer_in(text) == text
    assert AnswerRule((), ("</b>", "</a>"), True).answer_in(f"{text}</a>") == text
    config = RunConfig(name="x", steps=1, environment=EnvironmentConfig(function="some.module:environment"))
    assert answer_rule(config).turns and not answer_rule(RunConfig(name="x", steps=1)).turns


def test_an_answer_shows_observed_lines_apart() -> None:
    ids = [*b"I ask.</s>", *b"user\n42\n\n", *b"It is 42."]
    sampled = [*[True] * 10, *[False] * 9, *[True] * 9]
    assert conversation_text(ByteTokenizer(), ids, sampled, ("</s>",)) == "I ask.\n> user\n> 42\nIt is 42."


def test_stop_strings_of_the_tokenizer_end_answers_everywhere() -> None:
    """They come from the model and from the recipe."""
    tokenizer = ByteTokenizer()
    tokenizer.stop_strings = find_stop_strings(("</answer>",), tokenizer)
    text = "4</answer>"
    tokens, lengths = np.array([list(text.encode())], np.int32), np.array([len(text)])
    reward = function_reward(lambda completion, answer: len(completion), [PROBLEM], tokenizer)
    assert reward.score(tokens, lengths, np.array([0]))[0].tolist() == [1.0]
    rollout = RolloutOptions(stop_strings=tokenizer.stop_strings)
    experiment: Any = SimpleNamespace(tokenizer=tokenizer, config=SimpleNamespace(rollout=rollout))
    assert answer_text(experiment, list(text.encode())) == "4"


@pytest.mark.parametrize("pattern", ["<answer>(.*?)</answer>", r"<answer\>(.*?)\<\/answer>$", r"(\d)</answer>\n"])
def test_a_pattern_that_looks_for_a_stop_string_is_refused(pattern: str) -> None:
    def build(*stops: str) -> None:
        reward = RewardConfig("regex", pattern=pattern)
        config = RunConfig(name="x", steps=1, data=DataConfig(tokenizer="bytes"), reward=reward)
        build_tokenizer(replace(config, rollout=replace(config.rollout, stop_strings=stops)))

    with refuses("reward.pattern = ...: must not have </answer>, which is cut with rollout.stop_strings", ConfigError):
        build("</answer>")
    build(">.", "or", ".*")


def as_called(function: Callable[..., Any]) -> Any:
    return scorer_of(function)(Completion("all", "part"), {"prompt": "p", "answer": "a", "columns": {}})


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)

    return wrapper


@pytest.mark.parametrize(
    ("function", "got"),
    [
        (lambda completion, answer: (completion, answer), ("part", "a")),
        (lambda x, y: (x, y), ("part", "a")),
        (lambda *xs: xs, ("part", "a")),
        (lambda answer, completion: (completion, answer), ("part", "a")),
        (lambda problem, completion: (completion, problem["prompt"]), ("part", "p")),
        (lambda ground_truth, response: (response, ground_truth), ("part", "a")),
        (lambda x, problem: (x, problem["prompt"]), ("part", "p")),
        (lambda y_true, y_pred: (y_pred, y_true), ("part", "a")),
        (lambda label, text: (text, label), ("part", "a")),
        (lambda gt, pred: (pred, gt), ("part", "a")),
        (lambda expected_answer, generated: (generated, expected_answer), ("part", "a")),
        (lambda reference_answer, model_output: (model_output, reference_answer), ("part", "a")),
        (lambda ref, hyp: (hyp, ref), ("part", "a")),
        (lambda x, whole_text: (x, whole_text), ("part", "all")),
        (lambda whole_text, x: (x, whole_text), ("a", "all")),
        (lambda answer, whole_text, completion: (answer, whole_text, completion), ("a", "all", "part")),
        (lambda *, answer, completion: (completion, answer), ("part", "a")),
        (lambda x, y, tolerance=0.5, whole_text=None: (x, y, tolerance, whole_text), ("part", "a", 0.5, "all")),
        (wrapped(lambda problem, completion: (completion, problem["prompt"])), ("part", "p")),
        (functools.partial(lambda scale, completion, answer: (scale, completion, answer), 2), (2, "part", "a")),
    ],
)
def test_row_70_names_of_parameters_are_obeyed(function: Callable[..., Any], got: Any) -> None:
    assert as_called(function) == got


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda answer, x: 0, "answer stands in the place of the completion"),
        (lambda problem, x: 0, "problem stands in the place of the completion"),
        (lambda answer, problem: 0, "names must give the completion to one"),
        (lambda completion, response: 0, "names must give the completion to one"),
        (lambda prompts, completions, **columns: 0, "prompts is not given"),
        (lambda completion, prompt: 0, "prompt is not given"),
        (lambda question, answer: 0, "question is not given"),
        (lambda completion, answer, extra: 0, "extra is not given"),
        (lambda completion: 0, "takes too few"),
    ],
)
def test_row_70_names_that_contradict_places_are_refused(function: Callable[..., Any], reason: str) -> None:
    with refuses(f"reward = f: takes (...): {reason}...; must take (completion, problem) or (completion, answer)"):
        scorer_of(function, owner="reward = f")

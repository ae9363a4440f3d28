"""The reward function that a run's configuration names."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from configs.schema import RewardConfig, RunConfig
from configs.schema.functions import is_function
from configs.schema.rewards import ENVIRONMENT, NO_REWARD, ON_DEVICE, TRACED
from launch.data.problems import Problem
from launch.data.tokenizers import Tokenizer
from launch.errors import ConfigError
from launch.phases.long_phases import long_phase
from launch.rewards.answers import AnswerRule
from launch.rewards.host_scorer import FunctionScorer, HostScorer, as_object
from launch.rewards.reader import AnswerReader, answer_rule
from launch.rewards.scorers import FUNCTION, NAMED, load_scorer
from launch.rewards.workers import CHUNK, RewardPool
from specjax.rewards import HostReward, RewardFn, drawn, environment_reward, no_reward
from specjax.types import Prompts, Reward, Rollout

logger = logging.getLogger(__name__)

RewardOf = Callable[[Sequence[Problem], Tokenizer], RewardFn]


def make_pool(config: RunConfig) -> RewardPool | None:
    """Return the scorer processes; None if the reward is traced."""
    rule = answer_rule(config)
    return None if config.reward.scorer in ON_DEVICE else RewardPool(config.reward, rule.stop_strings, rule.turns)


def final_answers(
    config: RunConfig, tokenizer: Tokenizer, problems: Sequence[Problem]
) -> Callable[[Sequence[int], int], str | None] | None:
    """Return the function from token ids and the index of their problem to the final answer in them.

    It is None if the scorer has no `final_answer`. Call it only on completions that were scored, as that has no time
    limit.
    """
    final_answer = final_answer_of(config.reward)
    if final_answer is None:
        return None
    reader = AnswerReader(answer_rule(config), tokenizer, problems)

    def read(ids: Sequence[int], problem: int) -> str | None:
        answer = reader.read(ids, problem).answer
        return None if answer is None else final_answer(answer)

    return read


def final_answer_of(config: RewardConfig) -> Callable[[str], str | None] | None:
    """Return the scorer's `final_answer`, which reads the answer of a completion; None if it has none.

    It runs in this process without a time limit, so call it only on completions that were scored. A completion on which
    it raises an exception has no answer.
    """
    if config.scorer.startswith(FUNCTION) or config.scorer in (ENVIRONMENT, NO_REWARD):
        return None
    name = "exact" if config.scorer == TRACED else config.scorer
    final_answer = load_scorer(name, config.pattern_of(name)).final_answer
    if final_answer is None:
        return None

    def answer_or_none(completion: str) -> str | None:
        try:
            return final_answer(completion)
        except Exception:
            return None

    return answer_or_none


def scoring_of(config: RewardConfig, pool: RewardPool | None) -> RewardOf:
    """Return the function from problems to the reward of their completions. pool: that `make_pool` made."""
    on_device = {ENVIRONMENT: environment_reward, NO_REWARD: no_reward}
    if config.scorer in on_device:
        return lambda problems, tokenizer: on_device[config.scorer]
    return partial(make_reward, pool)


def make_reward(pool: RewardPool | None, problems: Sequence[Problem], tokenizer: Tokenizer) -> RewardFn:
    """Return the reward function for completions of `problems`; without a pool, the traced one.

    The ids of prompts are indices into `problems`. Logs a warning about answers that the scorer rejects even if a
    completion states them. Raises ConfigError if a scorer of the user's returns no number for a made-up completion, the
    answer of the first problem, and Stopped at a signal.
    """
    if pool is None:
        return traced_exact(problems, tokenizer)
    if any(map(is_function, pool.scorers)):
        pool.check_type(problems[0].answer, as_object(problems[0]))
    never, with_words = unscorable_answers(pool, problems)
    for answers, fault in (
        (never, "does not score 1.0 if a completion states it, so nothing can be learnt from them"),
        (with_words, "scores 1.0 only with its words, and not its number alone"),
    ):
        if answers:
            logger.warning(
                "reward.scorer = %s: %d of %d problems have an answer that %s; answers: %s",
                *(pool.config.scorer, sum(problem.answer in answers for problem in problems), len(problems), fault),
                ", ".join(map(repr, answers[:5])) + (", .." if len(answers) > 5 else ""),
            )
    scorer = HostScorer(pool, AnswerReader(pool.rule, tokenizer, problems), pool.config)
    return HostReward(scorer, pool.config.parts)


def unscorable_answers(pool: RewardPool, problems: Sequence[Problem]) -> tuple[list[str], list[str]]:
    """Return the distinct answers that do not score 1.0 when stated, and those whose number does not without its words.

    There are none without a `stating`.
    """
    name = pool.config.scorer
    stating = load_scorer(name, pool.config.pattern_of(name)).stating if name in NAMED else None
    if stating is None:
        return [], []
    answers = {problem.answer: problem for problem in problems}
    stated = [(answer, text) for answer in answers for text in stating(answer)]
    size, failed = pool.config.workers * CHUNK, list[tuple[str, str]]()
    parts = [stated[start : start + size] for start in range(0, len(stated), size)]
    with long_phase(f"check of {len(answers)} answers", len(parts), "parts", kept=False, quiet=True) as phase:
        for part in parts:
            scored = pool.score([text for _, text in part], [as_object(answers[answer]) for answer, _ in part])
            values = scored[:, pool.scorers.index(name)].tolist()
            failed += [each for each, value in zip(part, values, strict=True) if value != 1.0]
            phase.finish()
    never = {answer: None for answer, text in failed if text == stating(answer)[0]}
    return list(never), [answer for answer, _ in failed if answer not in never]


def function_reward(
    function: Callable[..., Any],
    problems: Sequence[Problem],
    tokenizer: Tokenizer,
    thinking: tuple[str, ...] = (),
    turns: bool = False,
) -> HostReward:
    """Return the reward that a function of this process gives to completions of `problems` (`FunctionScorer`).

    thinking, turns: as in `AnswerRule`.

    Raises ConfigError if the function returns no number for a made-up completion, the answer of the first problem.
    """
    name = getattr(function, "__name__", type(function).__name__)
    scorer = FunctionScorer(function, name)
    scorer.check_type(problems[0].answer, as_object(problems[0]))
    config = RewardConfig(f"{FUNCTION}{name}")
    rule = AnswerRule(thinking, tuple(tokenizer.stop_strings), turns)
    return HostReward(HostScorer(scorer, AnswerReader(rule, tokenizer, problems), config))


def traced_exact(problems: Sequence[Problem], tokenizer: Tokenizer) -> RewardFn:
    """Return a traced reward: 1 if a completion ends with '#', the answer and a stop token, else 0.

    It compares token ids. Raises ConfigError with stop strings: their tokens would stand between answer and end.
    """
    if tokenizer.stop_strings:
        raise ConfigError(
            f"reward.scorer = {TRACED}: compares the tokens before a stop token; must be exact with stop strings"
        )
    endings = [tokenizer.encode(f"#{problem.answer}") for problem in problems]
    width = max(map(len, endings))
    # Right-aligned, as completions end; -1 matches anything.
    table = np.full((len(endings), width), -1, np.int32)
    for row, ending in zip(table, endings, strict=True):
        row[width - len(ending) :] = ending

    def reward(rollout: Rollout, prompts: Prompts) -> Reward:
        ids = jnp.repeat(prompts.id, len(rollout.lengths) // len(prompts.id))
        expected = jnp.asarray(table)[jnp.maximum(ids, 0)]
        tokens, lengths = drawn(rollout)
        column = lengths[:, None] - 1 - width + jnp.arange(width + 1)[None]
        actual = jnp.take_along_axis(tokens, jnp.maximum(column, 0), axis=1)
        match = (expected < 0) | ((column[:, :-1] >= 0) & (actual[:, :-1] == expected))
        stops = jnp.isin(actual[:, -1], jnp.array(tokenizer.stop_tokens, jnp.int32)) & (lengths > 0)
        correct = (match.all(axis=1) & stops).astype(jnp.float32)
        return Reward(value=jnp.where(ids >= 0, correct, jnp.nan), correct=correct)

    return reward

"""The reward function that a run's configuration names."""

import json
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from configs.schema.functions import is_function
from configs.schema.rewards import TRACED, LengthConfig, RewardConfig
from launch.cli.errors import ConfigError, first_line
from launch.cli.long_phases import NOT_KEPT, LongPhases
from launch.data.json_lines import json_text
from launch.data.problems import Problem
from launch.data.prompts import prompt_fields
from launch.data.tokenizers import Tokenizer
from launch.rewards.scorers import FUNCTION, NAMED, NotANumber, NoValue, as_number, load_scorer, scorer_of
from launch.rewards.workers import CHUNK, RewardPool
from specjax.rewards import HostReward, HostScore, RewardFn
from specjax.types import Prompts, Reward, Rollout

logger = logging.getLogger(__name__)


def make_pool(config: RewardConfig) -> RewardPool | None:
    """Return the scorer processes; None if the reward is traced."""
    return None if config.scorer == TRACED else RewardPool(config)


def final_answer_of(config: RewardConfig) -> Callable[[str], str | None] | None:
    """Return the scorer's `final_answer`; None if it has none.

    It runs in this process without a time limit, so call it only on completions that were scored. A completion on which
    it raises an exception has no answer.
    """
    if config.scorer.startswith(FUNCTION):
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


def make_reward(
    pool: RewardPool | None, problems: Sequence[Problem], tokenizer: Tokenizer, long_phases: LongPhases = NOT_KEPT
) -> RewardFn:
    """Return the reward function for completions of `problems`; without a pool, the traced one.

    The ids of prompts are indices into `problems`. Logs a warning about answers that the scorer rejects even if a
    completion states them. Raises ConfigError if a scorer of the user's returns no number for a made-up completion, the
    answer of the first problem, and Stopped at a signal.
    """
    if pool is None:
        return traced_exact(problems, tokenizer)
    if any(map(is_function, pool.scorers)):
        pool.check_type(problems[0].answer, _as_object(problems[0]))
    if unscorable := unscorable_answers(pool, problems, long_phases):
        logger.warning(
            "reward.scorer = %s: %d of %d problems have an answer that does not score 1.0 even if a completion states "
            "it, so nothing can be learnt from them; answers: %s",
            *(pool.config.scorer, sum(problem.answer in unscorable for problem in problems), len(problems)),
            ", ".join(map(repr, unscorable[:5])) + (", .." if len(unscorable) > 5 else ""),
        )
    return HostReward(host_scorer(pool, tokenizer, problems), pool.config.parts)


def unscorable_answers(pool: RewardPool, problems: Sequence[Problem], long_phases: LongPhases = NOT_KEPT) -> list[str]:
    """Return the distinct answers that do not score 1.0 when stated; none without a `stating`."""
    name = pool.config.scorer
    stating = load_scorer(name, pool.config.pattern_of(name)).stating if name in NAMED else None
    if stating is None:
        return []
    answers = {problem.answer: problem for problem in problems}
    values, size = list[float](), pool.config.workers * CHUNK
    distinct = list(answers.values())
    parts = [distinct[start : start + size] for start in range(0, len(distinct), size)]
    with long_phases.phase(f"check of {len(answers)} answers", len(parts), "parts", kept=False, quiet=True) as phase:
        for part in parts:
            scored = pool.score([stating(problem.answer) for problem in part], list(map(_as_object, part)))
            values += scored[:, pool.scorers.index(name)].tolist()
            phase.finish()
    return [answer for answer, value in zip(answers, values, strict=True) if value != 1.0]


def host_scorer(pool: RewardPool, tokenizer: Tokenizer, problems: Sequence[Problem]) -> HostScore:
    """Return a scorer of token ids: (tokens [r, C], lengths [r], ids [r]) -> (value [r], correct [r]), float32.

    `value` is the weighted sum of all scorers; with several, a third array holds their own values, [r, scorers].
    `correct` is 1.0 where the first scorer's value is above 0.5. `ids` are indices into `problems`; rows with a
    negative id are padding and get NaN.
    """
    config = pool.config
    weights = np.array(config.weights or [1.0] * len(config.names), np.float32)

    def score(tokens: np.ndarray, lengths: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, ...]:
        rows = np.flatnonzero(ids >= 0)
        completions = [tokenizer.decode(tokens[row, : lengths[row]].tolist()) for row in rows]
        objects = _as_objects(problems, ids)
        by_text = pool.score(completions, [objects[ids[row]] for row in rows])
        columns = dict(zip(pool.scorers, by_text.T, strict=True))
        if "length" in config.names:
            columns["length"] = length_penalty(lengths[rows], config.length)
        values = np.full((len(ids), len(config.names)), np.nan, np.float32)
        values[rows] = np.stack([columns[name] for name in config.names], axis=1)
        total, correct = values @ weights, (values[:, 0] > 0.5).astype(np.float32)
        return (total, correct, values) if config.parts else (total, correct)

    return score


def function_reward(function: Callable[..., Any], problems: Sequence[Problem], tokenizer: Tokenizer) -> HostReward:
    """Return the reward that a function of this process gives to completions of `problems`.

    function: (completion, answer) or (completion, problem) -> number. A completion on which it raises an exception, or
              returns no finite number, has no reward. The first failure of each kind is logged. Completions of the same
              problem share the object, so the function must not change it.

    Raises ConfigError if the function returns no number for a made-up completion, the answer of the first problem.
    """
    name = getattr(function, "__name__", type(function).__name__)
    scorer, logged = scorer_of(function, owner=f"reward = {name}"), set[str]()
    try:
        as_number(scorer(problems[0].answer, _as_object(problems[0])))
    except NotANumber as error:
        raise ConfigError(f"reward = {name}: {error}") from None
    except Exception:
        # It may not be made for such a completion. Those of the model are counted.
        pass

    def score_one(completion: str, problem: dict[str, Any]) -> float:
        try:
            value = as_number(scorer(completion, problem))
            if math.isfinite(value):
                return value
            reason = f"returned {value}"
        except (NoValue, NotANumber) as error:
            reason = str(error)
        except Exception as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
        if (kind := reason.partition(":")[0]) not in logged:
            logged.add(kind)
            logger.warning(
                "reward: a completion has no reward: %s (shown once; the metric reward/failed counts them)", reason
            )
        return math.nan

    def score(tokens: np.ndarray, lengths: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, ...]:
        values, objects = np.full(len(ids), np.nan, np.float32), _as_objects(problems, ids)
        for row in np.flatnonzero(ids >= 0):
            completion = tokenizer.decode(tokens[row, : lengths[row]].tolist())
            values[row] = score_one(completion, objects[ids[row]])
        return values, (values > 0.5).astype(np.float32)

    return HostReward(score)


def _as_objects(problems: Sequence[Problem], ids: np.ndarray) -> dict[int, dict[str, Any]]:
    """Return the problems of a batch by their ids, each converted once for all its completions."""
    return {problem: _as_object(problems[problem]) for problem in set(ids.tolist()) if problem >= 0}


def _as_object(problem: Problem) -> dict[str, Any]:
    """Return a problem as scorers of one's own get it."""
    columns = json.loads(json_text(dict(problem.columns)))
    return {"prompt": prompt_fields(problem.prompt), "answer": problem.answer, "columns": columns}


def length_penalty(lengths: np.ndarray, config: LengthConfig) -> np.ndarray:
    """Return a reward in -1 .. 0 that depends only on the length of a completion in tokens."""
    assert config.most is not None
    outside = np.maximum(np.maximum(config.least - lengths, lengths - config.most), 0)
    return -np.minimum(outside / config.slack, 1.0)


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
        column = rollout.lengths[:, None] - 1 - width + jnp.arange(width + 1)[None]
        actual = jnp.take_along_axis(rollout.tokens, jnp.maximum(column, 0), axis=1)
        match = (expected < 0) | ((column[:, :-1] >= 0) & (actual[:, :-1] == expected))
        stops = jnp.isin(actual[:, -1], jnp.array(tokenizer.stop_tokens, jnp.int32)) & (rollout.lengths > 0)
        correct = (match.all(axis=1) & stops).astype(jnp.float32)
        return Reward(value=jnp.where(ids >= 0, correct, jnp.nan), correct=correct)

    return reward

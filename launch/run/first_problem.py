"""The first problem as it will be asked and scored, shown before a run spends anything on it."""

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from configs.schema import RewardConfig
from configs.schema.rewards import ENVIRONMENT, NO_REWARD, TRACED
from launch.errors import ConfigError
from launch.evaluation.one_prompt import as_asked
from launch.rewards.boxes import boxed
from launch.rewards.host_scorer import HostScorer
from launch.rewards.reader import AnswerReader, answer_rule
from launch.rewards.scorers import NAMED, load_scorer
from launch.rewards.thinking import KNOWN, thinking_of
from launch.setup.experiment import Experiment
from specjax.parallel import processes
from specjax.rewards import HostReward, RewardFn
from specjax.types import Prompts, Rollout

CUT_OFF = "cut off while thinking"
PROMPT_CHARACTERS, TEXT_CHARACTERS = 1200, 60


def describe_first_problem(experiment: Experiment, reward_fn: RewardFn) -> list[str]:
    """Return lines: the first prompt as the model is asked, and made-up completions of it with their rewards.

    Completions that the tokenizer cannot encode are left out. Raises ConfigError if none of the others gets a reward:
    every step would go the same way.
    """
    tokenizer = experiment.tokenizer
    asked = as_asked(experiment.problems.train[0], tokenizer).strip()
    if (cut := len(asked) - PROMPT_CHARACTERS) > 0:
        half = PROMPT_CHARACTERS // 2
        asked = f"{asked[:half]}\n[.. {cut} characters ..]\n{asked[-half:]}"
    if experiment.config.reward.scorer in (ENVIRONMENT, NO_REWARD):
        return [asked]
    encoded = dict[str, list[int]]()
    examples = _examples(experiment)
    for kind, text in examples.items():
        try:
            encoded[kind] = tokenizer.encode(text) + [tokenizer.stop_tokens[0]] * (kind != CUT_OFF)
        except ConfigError:  # the alphabet of built-in sums
            pass
    rewards = _rewards(reward_fn, list(encoded.values()))
    if rewards is None:
        return [asked]
    if all(isinstance(reward, str) for reward in rewards):
        name = experiment.config.reward.scorer
        raise ConfigError(
            f"reward.scorer = {name}: scores no completion of the first problem, neither its answer nor an empty one "
            f"({rewards[0]}); must return a number"
        )
    shown = [f"none: {reward}" if isinstance(reward, str) else f"{reward:g}" for reward in rewards]
    rows = [(kind, _shortened(examples[kind]), reward) for kind, reward in zip(encoded, shown, strict=True)]
    kinds, texts = (max(len(row[column]) for row in rows) for column in (0, 1))
    table = [f"  {kind:<{kinds}}  {text:<{texts}}  {reward}" for kind, text, reward in rows]
    return [asked, "", "rewards of completions made up for it:", *table]


def _examples(experiment: Experiment) -> dict[str, str]:
    """Return completions of the first problem: right, wrong, empty, and cut off while thinking."""
    config, tokenizer, problems = experiment.config, experiment.tokenizer, experiment.problems.train
    reader = AnswerReader(answer_rule(config), tokenizer, problems)
    answer, state = problems[0].answer, _stating(config.reward)
    opening, closing = reader.rule.thinking or thinking_of(tokenizer, problems[0]) or KNOWN[0]
    if reader.opened(0):
        opening = ""  # the prompt has it
    else:
        closing = ""
    other = next((each.answer for each in problems if each.answer != answer), f"{answer}0")
    return {
        "its answer": closing + state(answer),
        "another answer": closing + state(other),
        "nothing": "",
        CUT_OFF: f"{opening}So it is {state(answer)}? Let me",
    }


def _stating(config: RewardConfig) -> Callable[[str], str]:
    """Return the function from an answer to a completion that states it, as the scorer reads it or in a box."""
    name = "exact" if config.scorer == TRACED else config.scorer
    stating = load_scorer(name, config.pattern_of(name)).stating if name in NAMED else None
    return boxed if stating is None else lambda answer: stating(answer)[0]


def _rewards(reward_fn: RewardFn, completions: list[list[int]]) -> list[float | str] | None:
    """Return the rewards of completions of the first problem, or the reasons why there are none.

    None: the host's scorer is not one of texts.
    """
    if isinstance(reward_fn, HostReward):
        if not isinstance(reward_fn.score, HostScorer):
            return None
        return reward_fn.score.results(completions, problem=0)
    lengths = np.array(list(map(len, completions)), np.int32)
    tokens = np.zeros((len(completions), max(lengths)), np.int32)
    for row, ids in zip(tokens, completions, strict=True):
        row[: len(ids)] = ids
    first = jnp.zeros(1, jnp.int32)
    prompts = Prompts(tokens=first[None], lengths=first, id=first)
    rollout = Rollout(tokens=jnp.array(tokens), lengths=jnp.array(lengths))
    return processes.fetch(jax.jit(reward_fn)(rollout, prompts).value).tolist()


def _shortened(text: str) -> str:
    text = re.sub(r"\s+", " ", text)
    return text if len(text) <= TEXT_CHARACTERS else f"{text[: TEXT_CHARACTERS - 3]} .."

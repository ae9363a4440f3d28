"""Construction of the problems and the tokenizer of a run."""

import logging
import re
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from configs.schema import RewardConfig, RunConfig
from configs.schema.functions import is_function
from configs.schema.rewards import NO_REWARD
from launch.cli.functions import load_function, refusing_errors
from launch.data.arithmetic import ALPHABET, arithmetic
from launch.data.problems import Problem, describe_leak, describe_repeats, read_problems, split
from launch.data.stop_strings import find_stop_strings
from launch.data.tokenizers import (
    ByteTokenizer,
    CharacterTokenizer,
    HuggingFaceTokenizer,
    Tokenizer,
    check_no_template,
    token_id,
)
from launch.errors import ConfigError
from specjax.options import show
from specjax.short_repr import short_repr

logger = logging.getLogger(__name__)

_NO_TOKENIZER = (
    "model.path = None: must be a directory with a tokenizer or a name on the hub (ORG/NAME), or set data.tokenizer to "
    "bytes"
)
_NO_PROBLEMS = "data.train = None: must be a file of problems or a name on the hub, or set data.function"


class Problems(NamedTuple):
    """Training problems, and held-out problems to evaluate on."""

    train: list[Problem]
    held_out: list[Problem]

    __repr__ = short_repr


def check_sources(config: RunConfig) -> None:
    """Raise ConfigError unless `config` names a tokenizer and problems, with a line for each that it lacks."""
    data, missing = config.data, list[str]()
    if data.tokenizer == "checkpoint" and config.model.path is None:
        missing.append(_NO_TOKENIZER)
    if data.train is None and data.function is None and data.arithmetic is None:
        missing.append(_NO_PROBLEMS)
    if missing:
        raise ConfigError(*missing)


def build_tokenizer(config: RunConfig) -> Tokenizer:
    """Return the run's tokenizer. Its stop tokens and stop strings are the only list, from model and recipe.

    Raises ConfigError if there is no tokenizer or no stop token, if text of the recipe's is not one token, for stop
    strings that cannot occur in decoded text, and for a pattern that looks for one.
    """
    tokenizer, rollout = _tokenizer(config), config.rollout
    given = ((), ()) if rollout.replace_stop_tokens else (tokenizer.stop_tokens, tokenizer.stop_strings)
    chosen = [token_id("rollout.stop_tokens", token, tokenizer) for token in rollout.stop_tokens]
    strings = list(dict.fromkeys((*given[1], *rollout.stop_strings)))
    tokenizer.stop_tokens = tuple(dict.fromkeys((*given[0], *chosen)))
    if not tokenizer.stop_tokens:
        raise ConfigError(
            f"rollout.stop_tokens = (): must name at least one, because the files of model.path = {config.model.path} "
            "name no end-of-sequence token"
        )
    if isinstance(tokenizer, HuggingFaceTokenizer):
        cut = tokenizer.cut_tokens()
        _warn_of_cut_tokens(config.reward, cut)
        # A text may be a token that `decode` cuts.
        ends = [token_id("rollout.stop_strings", text, tokenizer) for text in strings if text in cut]
        tokenizer.stop_tokens = tuple(dict.fromkeys((*tokenizer.stop_tokens, *ends)))
        strings = [text for text in strings if text not in cut]
        if missed := next(((text, token) for text in strings for token in cut if token in text), None):
            raise ConfigError(
                f"rollout.stop_strings = {show(missed[0])!r}: {missed[1]} is cut from completions; must be "
                "text without it, or this token alone"
            )
    if fault := config.reward.pattern_fault(strings, f"rollout.stop_strings = {show(strings)}"):
        raise ConfigError(f"reward.{fault}")
    tokenizer.stop_strings = find_stop_strings(strings, tokenizer)
    return tokenizer


def _warn_of_cut_tokens(config: RewardConfig, cut: Sequence[str]) -> None:
    """Log a warning for each scorer that looks for tokens which are cut from the text that it gets.

    What a user's scorer looks for is not known. It is warned of tokens that open and close a part of the text, but for
    the markers of thinking, by which its text is cut already.
    """
    words = {token: re.sub(r"\W", "", token) for token in cut}  # think, of <think> and </think>
    for name in config.names:
        pattern, missed = config.pattern_of(name), []
        if pattern is not None:
            text = re.sub(r"\(\?(P<\w+>|<[=!])", "", pattern)  # without the < of named groups and lookbehinds
            missed = [token for token, word in words.items() if len(word) > 1 and word in text and token[0] in text]
        elif is_function(name):
            unread = {*cut} - {*config.thinking}
            missed = [token for token, word in words.items() if {f"<{word}>", f"</{word}>"} <= unread]
        if missed:
            option = {"regex": f"pattern = {pattern}", "format": f"format = {pattern}"}.get(name, f"scorer = {name}")
            logger.warning(
                "reward.%s: %s are cut from completions before scoring; reward.keep_special_tokens = True keeps all "
                "special tokens but stop tokens",
                *(option, ", ".join(missed)),
            )


def _tokenizer(config: RunConfig) -> Tokenizer:
    """Return the built-in tokenizer named by data.tokenizer, otherwise the one in model.path."""
    data = config.data
    if data.tokenizer != "checkpoint":
        check_no_template(f"data.tokenizer = {data.tokenizer}", data.system_prompt, data.chat_template_kwargs)
    if data.tokenizer == "bytes":
        return ByteTokenizer(data.instruction)
    if data.tokenizer == "characters":
        return CharacterTokenizer(ALPHABET, data.instruction)
    if config.model.path is None:
        raise ConfigError(_NO_TOKENIZER)
    return HuggingFaceTokenizer(
        config.model.path,
        instruction=data.instruction,
        system_prompt=data.system_prompt,
        template_kwargs=data.chat_template_kwargs,
        template_time=None if data.chat_template_time is None else datetime.fromisoformat(data.chat_template_time),
        keep_special_tokens=config.reward.keep_special_tokens,
    )


def build_problems(config: RunConfig) -> Problems:
    """Return the problems of the data section: from files, a function, or the built-in sums.

    Held-out problems come from data.held_out, else from the function, else they are split off the training problems.
    Logs a warning if some are also training problems. Raises ConfigError if the section names no problems or cannot be
    used.
    """
    data, held_out = config.data, None
    if data.train is not None:
        problems = load_problems(data.train, config, "data.train", distinct=True)
    elif data.function is not None:
        problems, held_out = call_function(data.function, config.seed)
        for part in problems, held_out:
            if (repeats := describe_repeats(part)) is not None:
                logger.warning("data.function = %s: %s", data.function, repeats)
    elif (task := data.arithmetic) is not None:
        problems = arithmetic(config.seed, task.problems, task.min_terms, task.max_terms, task.max_value)
    else:
        raise ConfigError(_NO_PROBLEMS)
    if data.held_out is not None:
        held_out = load_problems(data.held_out, config, "data.held_out", distinct=True)
    owner = f"data.function = {data.function}" if data.held_out is None else f"data.held_out = {data.held_out}"
    if held_out is None:
        problems, held_out = split(problems, data.held_out_count)
        owner = f"data.held_out_count = {len(held_out)}"
    if (leak := describe_leak(problems, held_out)) is not None:
        logger.warning("%s: %s", owner, leak)
    return Problems(problems, held_out)


def call_function(name: str, seed: int) -> tuple[list[Problem], list[Problem]]:
    """Call the function that data.function names. Return its training problems and held-out problems.

    Raises ConfigError if it cannot be imported, raises an exception, or returns anything else.
    """
    function = load_function("data.function", name)
    with refusing_errors("data.function", name, "return two lists of Problem"):
        train, held_out = map(list, function(seed))
    if not train or not held_out or not all(isinstance(each, Problem) for each in (*train, *held_out)):
        raise ConfigError(f"data.function = {name}: must return two non-empty lists of Problem")
    return train, held_out


def load_problems(paths: str | Sequence[str], config: RunConfig, option: str, distinct: bool = False) -> list[Problem]:
    """Read the problems of files or data sets, as the data and reward sections say. option: names `paths`.

    distinct: keep one of several equal problems.
    """
    data = config.data
    answer_field = None if config.reward.scorer == NO_REWARD else data.answer_field
    fields = data.prompt_field, answer_field, data.solution_field, data.answer_after
    return read_problems(
        paths,
        *fields,
        option=option,
        distinct=distinct,
        scorers=config.reward.names,
        tools_field=data.tools_field,
    )

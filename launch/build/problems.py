"""Construction of the problems and the tokenizer of a run."""

import logging
from typing import NamedTuple

from configs.schema import DataConfig, RunConfig
from launch.cli.errors import ConfigError
from launch.data.arithmetic import ALPHABET, arithmetic
from launch.data.problems import Problem, describe_leak, read_problems, split
from launch.data.tokenizers import (
    ByteTokenizer,
    CharacterTokenizer,
    HuggingFaceTokenizer,
    Tokenizer,
    check_no_template,
)

logger = logging.getLogger(__name__)


class Problems(NamedTuple):
    """Training problems, and held-out problems to evaluate on."""

    train: list[Problem]
    held_out: list[Problem]


def build_tokenizer(config: RunConfig) -> Tokenizer:
    """Return the built-in tokenizer that data.tokenizer names, otherwise the one in model.path.

    Raises ConfigError if neither gives one.
    """
    data = config.data
    if data.tokenizer != "checkpoint":
        check_no_template(f"data.tokenizer = {data.tokenizer}", data.system_prompt, data.chat_template_kwargs)
    if data.tokenizer == "bytes":
        return ByteTokenizer(data.instruction)
    if data.tokenizer == "characters":
        return CharacterTokenizer(ALPHABET, data.instruction)
    if config.model.path is None:
        raise ConfigError("model.path = None: must be a directory with a tokenizer, or set data.tokenizer to bytes")
    return HuggingFaceTokenizer(
        config.model.path,
        instruction=data.instruction,
        system_prompt=data.system_prompt,
        template_kwargs=data.chat_template_kwargs,
    )


def build_problems(config: RunConfig) -> Problems:
    """Return the problems of the data section, from files or from the built-in task.

    Without a file of held-out problems, they are split off the training problems; with one, a warning counts those
    that are training problems too. Raises ConfigError if the section
    names no problems or cannot be used.
    """
    data = config.data
    if data.train is not None:
        problems = load_problems(data.train, data, "data.train")
    elif (task := data.arithmetic) is not None:
        problems = arithmetic(config.seed, task.problems, task.min_terms, task.max_terms, task.max_value)
    else:
        raise ConfigError(
            "data.train = None: must be a file of problems or a data set on the hub, or set data.arithmetic"
        )
    if data.held_out is None:
        return Problems(*split(problems, data.held_out_count))
    held_out = load_problems(data.held_out, data, "data.held_out")
    if (leak := describe_leak(problems, held_out)) is not None:
        logger.warning("data.held_out = %s: %s", data.held_out, leak)
    return Problems(problems, held_out)


def load_problems(path: str, data: DataConfig, option: str) -> list[Problem]:
    """Read the problems that an option names. The data section names their fields."""
    fields = data.prompt_field, data.answer_field, data.solution_field, data.answer_after
    return read_problems(path, *fields, option=option)

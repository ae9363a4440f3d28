"""Construction of the problems and the tokenizer of a run."""

import logging
from dataclasses import dataclass

from configs.schema import DataConfig, RunConfig
from launch.cli.errors import ConfigError
from launch.data.arithmetic import ALPHABET, arithmetic
from launch.data.problems import Problem, describe_leak, load_jsonl, split
from launch.data.tokenizers import ByteTokenizer, CharacterTokenizer, HuggingFaceTokenizer, Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Problems:
    """Training problems, and held-out problems to evaluate on."""

    train: list[Problem]
    held_out: list[Problem]


def build_tokenizer(config: RunConfig) -> Tokenizer:
    """Return the built-in tokenizer that data.tokenizer names, otherwise the one in model.path.

    Raises ConfigError if neither gives one.
    """
    if config.data.tokenizer == "bytes":
        return ByteTokenizer(config.data.instruction)
    if config.data.tokenizer == "characters":
        return CharacterTokenizer(ALPHABET, config.data.instruction)
    if config.model.path is None:
        raise ConfigError("model.path = None: must be a directory with a tokenizer, or set data.tokenizer to bytes")
    return HuggingFaceTokenizer(
        config.model.path, instruction=config.data.instruction, enable_thinking=config.data.enable_thinking
    )


def build_problems(config: RunConfig) -> Problems:
    """Return the problems of the data section, from files or from the built-in task.

    Without a file of held-out problems, they are split off the training problems; with one, a warning counts those
    that are training problems too. Raises ConfigError if the section
    names no problems or cannot be used.
    """
    data = config.data
    if data.train is not None:
        problems = load_problems(data.train, data)
    elif (task := data.arithmetic) is not None:
        problems = arithmetic(config.seed, task.problems, task.min_terms, task.max_terms, task.max_value)
    else:
        raise ConfigError("data.train = None: must be a JSONL file of problems, or set data.arithmetic")
    if data.held_out is None:
        return Problems(*split(problems, data.held_out_count))
    held_out = load_problems(data.held_out, data)
    if (leak := describe_leak(problems, held_out)) is not None:
        logger.warning("data.held_out = %s: %s", data.held_out, leak)
    return Problems(problems, held_out)


def load_problems(path: str, data: DataConfig) -> list[Problem]:
    """Read the problems of a JSONL file. The data section names the fields."""
    return load_jsonl(path, data.prompt_field, data.answer_field, data.solution_field, data.answer_after)

"""Problems and tokenizer of a run."""

from dataclasses import dataclass

from configs.schema import DataConfig, RunConfig
from launch.cli.errors import ConfigError
from launch.data.arithmetic import ALPHABET, arithmetic
from launch.data.problems import Problem, load_jsonl, split
from launch.data.tokenizers import ByteTokenizer, CharacterTokenizer, HuggingFaceTokenizer, Tokenizer


@dataclass(frozen=True)
class Problems:
    """Problems to train on, and others to evaluate on."""

    train: list[Problem]
    held_out: list[Problem]


def build_tokenizer(config: RunConfig) -> Tokenizer:
    """Return the built-in tokenizer that data.tokenizer names, or else that of model.path."""
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
    """Return the problems that the data section names: files, or the built-in task."""
    data = config.data
    if data.train is not None:
        problems = load_problems(data.train, data)
    elif (a := data.arithmetic) is not None:
        problems = arithmetic(config.seed, a.problems, a.min_terms, a.max_terms, a.max_value)
    else:
        raise ConfigError("data.train = None: must be a JSONL file of problems")
    if data.held_out is None:
        return Problems(*split(problems, data.held_out_count))
    return Problems(problems, load_problems(data.held_out, data))


def load_problems(path: str, data: DataConfig) -> list[Problem]:
    """Read the problems of a JSONL file, with the field names of the data section."""
    return load_jsonl(path, data.prompt_field, data.answer_field, data.solution_field, data.answer_after)

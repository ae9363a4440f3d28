"""The section of a run that describes its problems."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ArithmeticConfig:
    """The built-in task: sums with worked steps.

    Attributes:
        problems:  Number of problems, including those held out.
        min_terms: Fewest numbers in a sum.
        max_terms: Most numbers in a sum.
        max_value: Numbers are 1 .. max_value.
    """

    problems: int = 4096
    min_terms: int = 3
    max_terms: int = 6
    max_value: int = 9


@dataclass(frozen=True)
class DataConfig:
    """The problems to train on, and those held out.

    Attributes:
        train:             JSONL file of problems. None: the built-in task, if the recipe has one.
        held_out:          JSONL file of problems to evaluate on. None: split off training problems.
        held_out_count:    How many to split off.
        prompt_field:      Field of the problem.
        answer_field:      Field of the answer.
        solution_field:    Field of a worked solution to warm up on, if there is one.
        answer_after:      The answer follows the last such marker in its field (#### in GSM8K).
        instruction:       Prompt template. {prompt} is the problem; other braces are doubled.
        tokenizer:         checkpoint: the model's, with its chat template; the others are built in.
        enable_thinking:   Passed to the chat template if set.
        prompts:           Prompts per step, over all data shards.
        max_prompt_tokens: Longer prompts are dropped, with a warning.
        arithmetic:        The built-in task.
    """

    train: str | None = None
    held_out: str | None = None
    held_out_count: int = 256
    prompt_field: str = "question"
    answer_field: str = "answer"
    solution_field: str | None = None
    answer_after: str | None = None
    instruction: str = "{prompt}"
    tokenizer: Literal["checkpoint", "bytes", "characters"] = "checkpoint"
    enable_thinking: bool | None = None
    prompts: int = 32
    max_prompt_tokens: int = 512
    arithmetic: ArithmeticConfig | None = None

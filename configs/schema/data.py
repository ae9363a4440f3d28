"""The section of a run that describes its problems."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ArithmeticConfig:
    """The built-in task: sums with worked steps.

    Attributes:
        problems:  how many, held-out ones included.
        min_terms: numbers in a sum, at least.
        max_terms: numbers in a sum, at most.
        max_value: each number is 1 .. max_value.
    """

    problems: int = 4096
    min_terms: int = 3
    max_terms: int = 6
    max_value: int = 9


@dataclass(frozen=True)
class DataConfig:
    """The problems to train on and those held out.

    Attributes:
        train:             a JSONL file; None generates the built-in task that `arithmetic` describes.
        held_out:          a JSONL file to evaluate on; None holds some of the training problems out.
        held_out_count:    how many of them.
        prompt_field:      of a line, the problem.
        answer_field:      of a line, the answer.
        solution_field:    of a line, a worked solution to warm up on; None where there is none.
        answer_after:      the answer is what follows the last such marker in its field ("####" in GSM8K).
        instruction:       how a prompt is put to the model; {prompt} stands for it, other braces are doubled.
        tokenizer:         `checkpoint` is the one in the model's directory, with its chat template; built in are
                           `bytes` and `characters`, those of the built-in task.
        enable_thinking:   handed to the chat template where set.
        prompts:           in a batch, over all shards.
        max_prompt_tokens: longer prompts are dropped and counted.
        arithmetic:        the built-in task; None where the problems are to come from a file.
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

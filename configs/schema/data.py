"""Section of a run that describes its problems."""

import json
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, Literal

from configs.schema.functions import check_function
from specjax.options import Options, Positive, at_least, at_most, show

# One path, or several to read one after the other.
Paths = tuple[str, ...] | str
Terms = Annotated[int, at_least(2), at_most(64)]


@dataclass(frozen=True)
class ArithmeticConfig(Options):
    """The built-in task: sums with worked steps.

    Attributes:
        problems:  Number of problems, including the held-out ones.
        min_terms: Smallest count of numbers in a sum.
        max_terms: Largest count of numbers in a sum.
        max_value: Each number lies in 1 .. max_value.
    """

    problems: Annotated[int, at_least(1), at_most(1_000_000)] = 4096
    min_terms: Terms = 3
    max_terms: Terms = 6
    max_value: Annotated[int, at_least(1), at_most(1_000_000)] = 9


@dataclass(frozen=True)
class DataConfig(Options):
    """Training problems and held-out problems.

    A name on the hub is org/name[@revision][:[subset/]split].

    Attributes:
        train:             Training problems: files (JSONL, JSON, CSV, parquet), folders of them, or names on the
                           hub. None: `function` or `arithmetic` makes them.
        function:          Your own problems, as package.module:name. It takes the seed and returns two lists of
                           Problem, for training and held out.
        held_out:          Problems to evaluate on. None: of `function`, or train's last.
        held_out_count:    Number of training problems to hold out if held_out and function are None. None: 256, or a
                           fifth of them if that is fewer.
        prompt_field:      Field of the problem: text or a list of messages. a.b is field b within field a.
        tools_field:       Field of tools for the chat template, if a row has it.
        answer_field:      Field of the answer: text or a number.
        solution_field:    Field of a worked solution, for the warm-up. None: no solutions.
        answer_after:      Read the answer after the last such marker (#### in GSM8K). None: the whole field.
        instruction:       Prompt template. {prompt} is the problem; write other braces twice.
        tokenizer:         checkpoint: the model's, with its chat template. bytes and characters are built in.
        system_prompt:     System message of prompts that have none.
        chat_template_kwargs: Variables of the chat template: {"enable_thinking": false}.
        chat_template_time: What strftime_now of a chat template takes for now, as 2026-11-28T09:30:00. None: the start
                           of the run, also for programs that read the run.
        prompts:           Prompts per step, over all data shards.
        max_prompt_tokens: Drop longer prompts, with a warning. The others are padded to the longest.
        arithmetic:        The built-in task.
    """

    train: Paths | None = None
    function: str | None = None
    held_out: Paths | None = None
    held_out_count: Positive | None = None
    prompt_field: str = "question"
    tools_field: str | None = "tools"
    answer_field: str = "answer"
    solution_field: str | None = None
    answer_after: str | None = None
    instruction: str = "{prompt}"
    tokenizer: Literal["checkpoint", "bytes", "characters"] = "checkpoint"
    system_prompt: str | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    chat_template_time: str | None = None
    prompts: Positive = 32
    max_prompt_tokens: Positive = 512
    arithmetic: ArithmeticConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_function("function", self.function)
        for name in ("train", "held_out"):
            if not all(getattr(self, name) or ()) or getattr(self, name) in ("", ()):
                raise ValueError(f"{name} = {show(getattr(self, name))}: must be paths, or None")
        given = self.chat_template_kwargs
        try:
            kept = isinstance(given, dict) and json.loads(json.dumps(given)) == given
        except (TypeError, ValueError, RecursionError):
            kept = False
        if not kept:
            raise ValueError(f"chat_template_kwargs = {show(given)}: must be an object that JSON can hold")
        try:
            if self.chat_template_time is not None:
                datetime.fromisoformat(self.chat_template_time)
        except ValueError:
            time = show(self.chat_template_time)
            raise ValueError(f"chat_template_time = {time}: must be a time as 2026-11-28T09:30:00") from None
        if self.chat_template_time is not None and self.tokenizer != "checkpoint":
            raise ValueError(f"chat_template_time = {self.chat_template_time}: must be None with a built-in tokenizer")

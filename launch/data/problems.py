"""Problems to train and evaluate on: the type, a reader, and the split into training and held-out problems."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from launch.cli.errors import ConfigError
from launch.data.json_lines import text_field
from launch.data.prompts import Message, Prompt, read_prompt
from launch.data.records import read_records


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem.

    Attributes:
        prompt:   text or messages, before instruction and chat format.
        answer:   the reference answer that scorers compare with.
        solution: worked solution to train on in the warm-up, if there is one.
        source:   place in the file it was read from, "path:line".
    """

    prompt: Prompt
    answer: str
    solution: str | None = None
    source: str | None = field(default=None, compare=False)

    @property
    def question(self) -> str:
        """The prompt's text without system messages, normalised in case, spaces and Unicode forms, for comparison."""
        messages = self.prompt if isinstance(self.prompt, tuple) else (Message("user", self.prompt),)
        text = " ".join(message.text for message in messages if message.role != "system")
        return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def read_problems(
    path: str | Path,
    prompt_field: str,
    answer_field: str,
    solution_field: str | None = None,
    answer_after: str | None = None,
    *,
    option: str = "data.train",
) -> list[Problem]:
    """Read problems from a file (JSONL, JSON, CSV, parquet), or from a data set on the hub (see launch.data.hub).

    Answer and solution are text or numbers; a prompt may also be a list of messages. `a.b` names a field within one.

    answer_after: a marker, "####" for GSM8K. The answer is the text after its last occurrence in the answer field.
    option:       for error messages. A data set without a split is read from its split train for data.train, and from
                  test for other options.

    Raises ConfigError for invalid input; the message names the file, and the line if there is one.
    """
    problems = []
    for record, where in read_records(option, path, "train" if option == "data.train" else "test"):
        answer = text_field(record, answer_field, where)
        if answer_after is not None:
            _, marker, answer = answer.rpartition(answer_after)
            if not marker or not answer.strip():
                raise ConfigError(f"{where}: field {answer_field!r}: must hold an answer after {answer_after!r}")
        problems.append(
            Problem(
                prompt=read_prompt(record, prompt_field, where),
                answer=answer.strip(),
                solution=None if solution_field is None else text_field(record, solution_field, where),
                source=where,
            )
        )
    if not problems:
        raise ConfigError(f"{path}: must hold at least one problem")
    return problems


def split(problems: Sequence[Problem], held_out: int) -> tuple[list[Problem], list[Problem]]:
    """Return (train, held-out). The last `held_out` problems are held out.

    Drops training problems whose question is held out.
    """
    if not 0 < held_out < len(problems):
        raise ConfigError(
            f"data.held_out_count = {held_out}: must be between 1 and {len(problems) - 1} for {len(problems)} problems"
        )
    held_out_problems = list(problems[-held_out:])
    questions = {problem.question for problem in held_out_problems}
    train = [problem for problem in problems[:-held_out] if problem.question not in questions]
    if not train:
        raise ConfigError(
            f"data.held_out_count = {held_out}: leaves no training problem, because the other "
            f"{len(problems) - held_out} problems have the same prompts as held-out ones; must be smaller"
        )
    return train, held_out_problems


def describe_leak(train: Sequence[Problem], held_out: Sequence[Problem]) -> str | None:
    """Return a one-line warning if training problems share their question with held-out ones, else None."""
    questions = {problem.question for problem in train}
    leaked = [problem for problem in held_out if problem.question in questions]
    if not leaked:
        return None
    return (
        f"{len(leaked)} of {len(held_out)} held-out problems are also training problems, the first at "
        f"{leaked[0].source or leaked[0].question}; accuracy on them says nothing about new problems"
    )

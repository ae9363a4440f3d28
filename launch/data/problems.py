"""Problems to train and evaluate on: the type, a reader, and the split into training and held-out problems."""

import logging
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.schema import DataConfig
from launch.data.json_lines import (
    field_value,
    json_text,
    optional_value,
    require_fields,
    text_field,
)
from launch.data.prompts import Message, Prompt, prompt_text, read_prompt, tool_texts
from launch.data.records import read_records
from launch.errors import ConfigError

logger = logging.getLogger(__name__)

# Problems that are held out by default, of at least 5 times as many.
HELD_OUT_COUNT = 256

# Names that other libraries' data sets give these fields.
USUAL_FIELDS = {
    "data.prompt_field": ("prompt", "messages", "question", "problem"),
    "data.answer_field": ("answer", "solution", "ground_truth", "reward_model.ground_truth"),
}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem.

    Attributes:
        prompt:   text or messages, before instruction and chat format.
        answer:   the reference answer that scorers compare with.
        solution: worked solution to train on in the warm-up, if there is one.
        source:   place in the file it was read from, "path:line".
        columns:  all columns of its row that are not null, for scorers of your own.
    """

    prompt: Prompt
    answer: str
    solution: str | None = None
    source: str | None = field(default=None, compare=False)
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The prompt as messages; text is one of the user."""
        return self.prompt if isinstance(self.prompt, tuple) else (Message("user", self.prompt),)

    @property
    def question(self) -> str:
        """The whole prompt, which tells problems apart: tools, and all messages with their roles.

        It is in Unicode's composed form, stripped. Text is a question as it stands, and equals that of a single user's
        message.
        """
        return "\x1e".join([*tool_texts(self.prompt), _question(self.messages)])

    @property
    def key(self) -> tuple[str, str, str]:
        """The question, the answer and the columns. Problems of equal keys are the same.

        Case, spaces within and compatibility forms count: they tell "2³" from "23", and code by its indentation.
        """
        return self.question, self.answer, json_text(dict(self.columns))


def read_problems(
    paths: str | Path | Sequence[str],
    prompt_field: str,
    answer_field: str | None,
    solution_field: str | None = None,
    answer_after: str | None = None,
    *,
    option: str = "data.train",
    distinct: bool = False,
    scorers: Sequence[str] = (),
    tools_field: str | None = DataConfig.tools_field,
) -> list[Problem]:
    """Read problems from files (JSONL, JSON, CSV, parquet), folders of them, or data sets on the hub (launch.data.hub).

    Answer and solution are text or numbers; a prompt may also be a list of messages. `a.b` names a field within one.
    Null counts as absent within messages, tools and columns.

    answer_field: None: answers are not read, and are "".
    answer_after: a marker, "####" for GSM8K. The answer is the text after its last occurrence in the answer field.
    option:       for error messages. A data set without a split is read from its split train for data.train, and from
                  test for other options.
    distinct:     keep one of several equal problems (`distinct_problems`).
    scorers:      names of the scorers. For a scorer of your own, problems keep their columns; if the first is one, an
                  answer may also be an object or a list, which becomes JSON.
    tools_field:  field of the tools that a prompt's chat template gets (`read_prompt`). Records may lack it.

    Raises ConfigError for invalid input; the message names the file, the line if there is one, and the option.
    """

    named = {"prompt_field": prompt_field, "answer_field": answer_field, "solution_field": solution_field}
    fields = {f"data.{name}": field for name, field in named.items() if field is not None}

    own, has_tools = any(":" in name for name in scorers), False
    needed, also = None if own else fields.values(), () if tools_field is None else (tools_field,)

    def read() -> Iterator[Problem]:
        nonlocal has_tools
        for record, where in read_records(option, paths, "train" if option == "data.train" else "test", needed, also):
            require_fields(record, fields, where, USUAL_FIELDS)
            has_tools |= tools_field is not None and optional_value(record, tools_field) is not None
            with _naming("data.answer_field"):
                answer = _answer(record, answer_field, where, answer_after, objects=":" in "".join(scorers[:1]))
            with _naming("data.prompt_field"):
                prompt = read_prompt(record, prompt_field, where, tools_field)
            with _naming("data.solution_field"):
                solution = None if solution_field is None else text_field(record, solution_field, where)
            yield Problem(
                prompt=prompt,
                answer=answer.strip(),
                solution=solution,
                source=where,
                columns={name: value for name, value in record.items() if value is not None} if own else {},
            )

    name = paths if isinstance(paths, str | Path) else " ".join(paths)
    problems = distinct_problems(read(), f"{option} = {name}") if distinct else [*read()]
    if not problems:
        raise ConfigError(f"{option} = {name}: must hold at least one problem")
    if not has_tools and tools_field not in (None, DataConfig.tools_field):
        logger.warning("data.tools_field = %s: no row of %s = %s has tools in such a field", tools_field, option, name)
    return problems


@contextmanager
def _naming(option: str) -> Iterator[None]:
    """Add the option that chose a field to what is wrong with the field's value."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{error}; {option} names this field") from None


def _answer(record: dict[str, Any], field: str | None, where: str, after: str | None, *, objects: bool) -> str:
    """Return the answer, after the marker `after` if there is one. objects: without a marker, it may be one."""
    if field is None:
        return ""
    if after is None:
        value = field_value(record, field, where)
        return json_text(value) if objects and isinstance(value, dict | list) else text_field(record, field, where)
    _, marker, answer = text_field(record, field, where).rpartition(after)
    if not marker or not answer.strip():
        raise ConfigError(f"{where}: field {field!r}: must hold an answer after {after!r}")
    return answer


def distinct_problems(problems: Iterable[Problem], owner: str) -> list[Problem]:
    """Return the problems without those that repeat the `key` of an earlier one. Log how many there were.

    Public files hold each problem up to 100 times, one for each sample. Problems that repeat only the prompt are kept,
    and counted in the log. owner: option and file, for the log.
    """
    kept: dict[tuple[str, str, str], Problem] = {}
    repeats = 0
    for problem in problems:
        repeats += kept.setdefault(problem.key, problem) is not problem
    total = repeats + len(kept)
    if repeats:
        logger.warning("%s: %d of %d problems dropped: each repeats an earlier one", owner, repeats, total)
    if contradictory := len(kept) - len({prompt for prompt, *_ in kept}):
        logger.warning(
            "%s: %d of %d problems kept with the prompt of an earlier one: their answer or columns differ",
            *(owner, contradictory, total),
        )
    return [*kept.values()]


def _composed(text: str) -> str:
    return unicodedata.normalize("NFC", text).strip()


def _question(messages: Sequence[Message]) -> str:
    if [message.role for message in messages] == ["user"]:
        return _composed(messages[0].text)
    # Characters that separate records and their fields, so that no text looks like two messages.
    return "\x1e".join(f"{message.role}\x1f{_composed(message.text)}" for message in messages)


def _folded(text: str) -> str:
    """Return the text without differences in case, spaces and compatibility forms, to find copies of a question."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def split(problems: Sequence[Problem], held_out: int | None) -> tuple[list[Problem], list[Problem]]:
    """Return (train, held-out). The last `held_out` problems are held out.

    held_out: None takes HELD_OUT_COUNT, or a fifth of the problems if that is fewer, at least 1.

    Drops training problems whose question is held out. Logs how many there were.
    """
    if held_out is None:
        held_out = max(min(HELD_OUT_COUNT, len(problems) // 5), 1)
    if len(problems) < 2:
        raise ConfigError(
            f"data.held_out_count = {held_out}: of {len(problems)} problem(s) none can be held out; must be at least 2 "
            "problems, or set data.held_out"
        )
    if not 0 < held_out < len(problems):
        raise ConfigError(
            f"data.held_out_count = {held_out}: must be between 1 and {len(problems) - 1} for {len(problems)} problems"
        )
    held_out_problems = list(problems[-held_out:])
    questions = {problem.question for problem in held_out_problems}
    train = [problem for problem in problems[:-held_out] if problem.question not in questions]
    if dropped := len(problems) - held_out - len(train):
        logger.warning(
            "data.held_out_count = %d: %d of %d training problems dropped: their prompts are held out",
            *(held_out, dropped, len(problems) - held_out),
        )
    if not train:
        raise ConfigError(
            f"data.held_out_count = {held_out}: leaves no training problem, because the other "
            f"{len(problems) - held_out} problems have the same prompts as held-out ones; must be smaller"
        )
    return train, held_out_problems


def describe_repeats(problems: Sequence[Problem]) -> str | None:
    """Return a one-line warning if problems repeat earlier ones, else None."""
    repeats = len(problems) - len({problem.key for problem in problems})
    return f"{repeats} of {len(problems)} problems repeat an earlier one" if repeats else None


def describe_leak(train: Sequence[Problem], held_out: Sequence[Problem]) -> str | None:
    """Return a one-line warning if training problems share their question with held-out ones, else None.

    Case, spaces and compatibility forms do not count, nor do messages that all problems of a set begin with: two files
    may ask the same problems with different system messages.
    """
    train_keys, held_out_keys = _leak_keys(train), _leak_keys(held_out)
    seen = {key for keys in train_keys for key in keys}
    leaked = [problem for problem, keys in zip(held_out, held_out_keys, strict=True) if keys & seen]
    if not leaked:
        return None
    return (
        f"{len(leaked)} of {len(held_out)} held-out problems are also training problems, but for case, spaces and "
        "Unicode forms, the first at "
        f"{leaked[0].source or prompt_text(leaked[0].prompt)}; accuracy on them says nothing about new problems"
    )


def _leak_keys(problems: Sequence[Problem]) -> list[set[str]]:
    """Return the folded question of each problem, with and without the messages that all of them begin with."""
    prompts, common = [problem.messages for problem in problems], 0
    if prompts:
        first, shortest = prompts[0], min(map(len, prompts))
        # One problem by itself does not show what others begin with; its system messages are a guess.
        while common < shortest - 1 and (
            first[common].role == "system"
            if len(prompts) == 1
            else all(prompt[common] == first[common] for prompt in prompts)
        ):
            common += 1
    return [
        {
            _folded("\x1e".join([*tool_texts(problem.prompt), _question(prompt)]))
            for prompt in (messages, messages[common:])
        }
        for problem, messages in zip(problems, prompts, strict=True)
    ]

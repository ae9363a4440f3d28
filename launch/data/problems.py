"""Problems to train and evaluate on, and where they come from."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.cli.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A prompt, the answer a scorer compares with, and a worked solution where there is one to learn from."""

    prompt: str
    answer: str
    solution: str | None = None


def load_jsonl(
    path: str | Path,
    prompt_field: str,
    answer_field: str,
    solution_field: str | None = None,
    answer_after: str | None = None,
) -> list[Problem]:
    """The problems of a JSONL file: one object a line, blank lines skipped, fields that are text or numbers.

    With `answer_after`, the answer is what follows the last occurrence of that marker in its field: "####" for GSM8K.
    Raises ConfigError naming the file, and the line where there is one, for whatever it cannot use.
    """
    problems = []
    for record, where in read_lines(path):
        answer = text_field(record, answer_field, where)
        if answer_after is not None:
            _, found, answer = answer.rpartition(answer_after)
            if not found or not answer.strip():
                raise ConfigError(f"{where}: no answer after {answer_after!r} in field {answer_field!r}")
        problems.append(
            Problem(
                prompt=text_field(record, prompt_field, where),
                answer=answer.strip(),
                solution=None if solution_field is None else text_field(record, solution_field, where),
            )
        )
    if not problems:
        raise ConfigError(f"{path}: holds no problems")
    return problems


def read_lines(path: str | Path) -> Iterator[tuple[dict[str, object], str]]:
    """The objects of a JSONL file, each with the `path:line` that it stands at; blank lines are skipped.

    Raises ConfigError naming that place, or the file, for whatever is not an object or cannot be read.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read it: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8 text") from None
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{path}:{number}"
            yield _record(line, where), where


def text_field(record: dict[str, object], field: str, where: str) -> str:
    """A field's text. Raises ConfigError, which begins with `where`, where it is absent, blank or no text or number."""
    if field not in record:
        raise ConfigError(f"{where}: no field {field!r}; it has {', '.join(map(repr, record)) or 'none'}")
    value = record[field]
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not str(value).strip():
        raise ConfigError(f"{where}: field {field!r} must be text or a number, not {json.dumps(value)[:80]}")
    return str(value)


def split(problems: Sequence[Problem], held_out: int) -> tuple[list[Problem], list[Problem]]:
    """(train, held out): the last `held_out` problems, and those before them whose prompts are not held out."""
    if not 0 < held_out < len(problems):
        raise ConfigError(
            f"data.held_out_count = {held_out}: must be between 1 and {len(problems) - 1}, of {len(problems)} problems"
        )
    kept = list(problems[-held_out:])
    unseen = {problem.prompt for problem in kept}
    return [problem for problem in problems[:-held_out] if problem.prompt not in unseen], kept


def _record(line: str, where: str) -> dict[str, object]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: must be a JSON object, not {type(record).__name__}")
    return record

"""A list of problems from Python, kept in a file, from which a resumed run and other programs read them."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from launch.cli.paths import CONFIG_FILE
from launch.errors import ConfigError
from models.files import write_atomically
from specjax.options import show

# A generator may never end, and its problems may be large. Letters are counted as in the file.
MOST_PROBLEMS, MOST_LETTERS = 1_000_000, 2**30


@dataclass(frozen=True)
class ProblemList:
    """Problems, and the file for them. It is named by their content: the same list has the same path.

    Attributes:
        lines: JSON Lines, one problem each.
        path:  the file, which may not exist yet.
    """

    lines: str
    path: Path

    @classmethod
    def of(cls, problems: Sequence[Mapping[str, Any]], *directories: Path) -> "ProblemList":
        """Return the list with its file in the first directory that has it already, else in the first.

        Raises ConfigError for what is no list of JSON objects.
        """
        if isinstance(problems, Mapping) or not hasattr(problems, "__iter__"):
            raise ConfigError(f"data = {show(problems)}: must be a path, a name on the hub, or a list of dicts")
        written, letters = list[str](), 0
        for number, problem in enumerate(problems):
            written.append(line := _line(number, problem))
            letters += len(line)
            if number >= MOST_PROBLEMS or letters > MOST_LETTERS:
                raise ConfigError(
                    f"data = {type(problems).__name__}: must hold at most {MOST_PROBLEMS:,} problems and "
                    f"{MOST_LETTERS:,} letters; more go into a file"
                )
        if not written:
            raise ConfigError("data = []: must hold at least one problem")
        lines = "".join(written)
        name = f"data-{hashlib.sha256(lines.encode()).hexdigest()[:12]}.jsonl"
        paths = [directory / name for directory in directories]
        return cls(lines, next((path for path in paths if path.exists()), paths[0]))

    @contextmanager
    def written(self) -> Iterator[None]:
        """Write the file. If the block raises before a run has recorded that it reads the file, remove it.

        A file that was there before stays. A refusal names problems by their place in the list.
        """
        made = [path for path in (self.path, *self.path.parents) if not path.exists()]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, self.lines)
        except OSError as error:
            raise ConfigError(f"out = {self.path.parent}: cannot be written: {error.strerror}") from None
        try:
            yield
        except BaseException as error:
            for path in made if not self._is_read() else ():
                with suppress(OSError):  # a directory that is in use, or gone
                    path.unlink() if path == self.path else path.rmdir()
            if isinstance(error, ConfigError):
                raise ConfigError(*map(self._by_place, error.args)) from None
            raise

    def _is_read(self) -> bool:
        """Return whether a run has recorded the file: one beside it, or in a directory beside it."""
        directory = self.path.parent
        configs = [directory / CONFIG_FILE, *directory.glob(f"*/{CONFIG_FILE}")]
        return any(self.path.name in path.read_text(errors="replace") for path in configs if path.is_file())

    def _by_place(self, message: str) -> str:
        """Return a message about lines of the file as one about problems of the list."""
        path = re.escape(str(self.path))
        message = re.sub(rf"{path}:(\d+)", lambda line: f"data[{int(line[1]) - 1}]", str(message))
        return re.sub(rf"(data\.train = )?{path}", "data", message)


def _line(number: int, problem: Any) -> str:
    if not isinstance(problem, Mapping):
        raise ConfigError(f"data[{number}] = {show(problem)}: must be a dict with a prompt and an answer")
    try:
        line = json.dumps(dict(problem), ensure_ascii=False, default=_plain) + "\n"
        line.encode()
        return line
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"data[{number}]: {error}; must hold text, numbers, lists and dicts") from None


def _plain(value: Any) -> Any:
    """Return numbers and arrays of numpy as Python's, floats with the fewest digits that their type needs."""
    if isinstance(value, np.ndarray):
        return [*value] if value.ndim else value[()]
    if isinstance(value, np.generic):
        item = value.tolist()
        return float(str(value)) if isinstance(item, float) else item
    raise TypeError(f"{type(value).__name__} is no JSON value")

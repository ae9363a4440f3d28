"""Errors that end a program with a line for each."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


class ConfigError(ValueError):
    """Bad input from the user. Each argument is a line that names a field, its value and what is allowed.

    Programs print the lines and end with exit code 2.
    """

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


class RunStopped(Exception):
    """Raised to end a run that cannot continue. The message is one line with the reason; the exit code is 1."""


class Stopped(Exception):
    """Raised to end a program that a signal stopped. The message is one line; the exit code is 128 + signal."""

    def __init__(self, signal: int, message: str) -> None:
        super().__init__(signal, message)  # another process of the job makes it from these
        self.signal = signal

    def __str__(self) -> str:
        return self.args[1]


@contextmanager
def as_config_error() -> Iterator[None]:
    """Turn the ValueError of a check into a ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error


def check_all(checks: Sequence[Callable[[], object]]) -> None:
    """Call all checks. Raise one ConfigError with a line for each thing that they refuse.

    Another error is raised only if nothing is refused: a check may fail on what another one refuses.
    """
    refusals, other = dict[str, None](), None
    for check in checks:
        try:
            check()
        except ConfigError as error:
            refusals |= dict.fromkeys(error.args)
        except Exception as error:
            other = other or error
    if refusals:
        raise ConfigError(*refusals)
    if other is not None:
        raise other


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, cut to 300 characters."""
    return one_line(str(error).strip().partition("\n")[0], 300)


def one_line(text: object, letters: int | None = None) -> str:
    """Return text as one line of at most so many printable letters. What a terminal would obey becomes a space."""
    return " ".join(printable(str(text)).split())[:letters]


def printable(text: str) -> str:
    """Return text in which what a terminal would obey, except line breaks and tabs, becomes a space."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else " " for letter in text)

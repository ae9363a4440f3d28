"""From the words of a command line to the values of its options."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from launch.cli.errors import ConfigError
from launch.cli.fields import Field


def values_of(fields: Sequence[Field], argv: Sequence[str], unread: Mapping[str, str]) -> dict[str, Any]:
    """Return the values that a command line gives, by path. unread: why options that exist elsewhere are unknown."""
    known, given = {field.flag: field for field in fields}, {}
    for flag, words in _split(argv):
        if flag not in known:
            hint = unread.get(flag, "")
            if not hint and (closest := difflib.get_close_matches(flag, known, n=1, cutoff=0.5)):
                hint = f"did you mean {closest[0]}?"
            raise ConfigError(f"{flag}: unknown option{hint and '; ' + hint}")
        with refusing():
            given[known[flag].path] = known[flag].read(words)
    return given


def _split(argv: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return each option with the words after it. Negative numbers are words."""
    options: list[tuple[str, list[str]]] = []
    for word in argv:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            options.append((flag.replace("_", "-"), [value] if equals else []))
        elif options:
            options[-1][1].append(word)
        else:
            raise ConfigError(f"{word}: unexpected, options begin with --")
    return options


@contextmanager
def refusing() -> Iterator[None]:
    """Turn the ValueError of a check into a ConfigError."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from error

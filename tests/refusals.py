"""Checks of refusals by field, value and what is allowed, never by the words between."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


def assert_refused(message: str, expected: str) -> None:
    """Verify that a message is one line that holds the parts of `expected`, which "..." separates, in this order.

    The message begins with the first part, or has it after "/" (a file of a path) or ": " (a field of that file). Begin
    `expected` with "..." to look for a part anywhere. A number at an end of a part must be a whole one in the message,
    outside words, paths and decimals.
    """
    assert "\n" not in message
    first, *others = expected.split("...")
    found = re.search(rf"(?:^|(?<=/)|(?<=: )){_pattern(first.removeprefix('/'))}", message) if first else None
    assert found or not first, f"{message!r} does not begin with {first!r}"
    end = found.end() if found else 0
    for part in others:
        found = re.compile(_pattern(part)).search(message, end)
        assert found, f"{part!r} of {expected!r} is missing in {message!r}"
        end = found.end()


def _pattern(part: str) -> str:
    before = r"(?<![\w./-])" if part[:1].isdigit() else ""
    after = r"(?![\w/-]|\.\w)" if part[-1:].isdigit() else ""
    return before + re.escape(part) + after


@contextmanager
def refuses(expected: str, error: type[Exception] = ValueError) -> Iterator[None]:
    """Verify that the block raises `error`, with a message that holds the parts of `expected`."""
    with pytest.raises(error) as caught:
        yield
    assert_refused(str(caught.value), expected)

"""Checks of error messages by field, value and what is allowed, but not by the words between them."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


def assert_refused(message: str, expected: str) -> None:
    """Verify that a message is one line and contains the parts of `expected`, separated by "...", in order.

    The message must begin with the first part, or have it after "/" (in a path) or ": " (a field of a file). Begin
    `expected` with "..." to allow it anywhere. A number at the start or end of a part must match a complete number.
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
    """Verify that the block raises `error` with a message as in `assert_refused`."""
    with pytest.raises(error) as caught:
        yield
    assert_refused(str(caught.value), expected)

"""Checks of refusals by field, value and what is allowed, never by the words between."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


def assert_refused(message: str, expected: str) -> None:
    """Verify that a message is one line that holds the parts of `expected`, which "..." separates, in this order."""
    assert "\n" not in message
    start = 0
    for part in expected.split("..."):
        assert part in message[start:], f"{part!r} of {expected!r} is missing in {message!r}"
        start = message.index(part, start) + len(part)


@contextmanager
def refuses(expected: str, error: type[Exception] = ValueError) -> Iterator[None]:
    """Verify that the block raises `error`, with a message that holds the parts of `expected`."""
    with pytest.raises(error) as caught:
        yield
    assert_refused(str(caught.value), expected)

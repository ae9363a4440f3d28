"""Scorers that go by a regular expression."""

import re
from collections import deque
from collections.abc import Callable


def regex_answer(pattern: str) -> Callable[[str, str], float]:
    """1.0 where the first group that took part in the last match is the answer, spaces around both aside; or, of a
    pattern without groups, where there is a match. Else 0.0.
    """
    compiled, given = re.compile(pattern), final_answer(pattern)
    if given is None:
        return lambda completion, answer: float(compiled.search(completion) is not None)
    return lambda completion, answer: float(given(completion) == answer.strip())


def final_answer(pattern: str) -> Callable[[str], str | None] | None:
    """completion -> what `regex_answer` compares, None where nothing matches; or None of a pattern without groups."""
    compiled = re.compile(pattern)
    if not compiled.groups:
        return None

    def given(completion: str) -> str | None:
        found = deque(compiled.finditer(completion), maxlen=1)
        if not found:
            return None
        return next((group for group in found[0].groups() if group is not None), "").strip()

    return given


def whole_format(pattern: str) -> Callable[[str, str], float]:
    """1.0 where all of the completion matches, else 0.0; a dot matches line ends too."""
    compiled = re.compile(pattern, re.DOTALL)
    return lambda completion, answer: float(compiled.fullmatch(completion) is not None)

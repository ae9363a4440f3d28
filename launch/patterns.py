"""Scorers that go by a regular expression."""

import re
from collections import deque
from collections.abc import Callable


def regex_answer(pattern: str) -> Callable[[str, str], float]:
    """1.0 where the first group that took part in the last match is the answer, spaces around both aside; or, of a
    pattern without groups, where there is a match. Else 0.0.
    """
    compiled = re.compile(pattern)

    def score(completion: str, answer: str) -> float:
        found = deque(compiled.finditer(completion), maxlen=1)
        if not (found and compiled.groups):
            return float(bool(found))
        given = next((group for group in found[0].groups() if group is not None), "")
        return float(given.strip() == answer.strip())

    return score


def whole_format(pattern: str) -> Callable[[str, str], float]:
    """1.0 where all of the completion matches, else 0.0; a dot matches line ends too."""
    compiled = re.compile(pattern, re.DOTALL)
    return lambda completion, answer: float(compiled.fullmatch(completion) is not None)

"""Scorers by name, each with its final answer. Imports nothing heavy: every scorer process loads this module."""

import logging
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from launch.cli.functions import load_function


class Scorer(NamedTuple):
    """A scorer: the value of a completion, and the final answer in it.

    Attributes:
        score:        (completion, answer) -> a number; above 0.5 is correct.
        final_answer: completion -> its answer, None if it gives none. None if the scorer has no notion of an answer.
        stating:      answer -> a completion that gives it and must score 1.0. None if the scorer knows no such form.
    """

    score: Callable[[str, str], Any]
    final_answer: Callable[[str], str | None] | None = None
    stating: Callable[[str], str] | None = None


def exact() -> Scorer:
    """Compare the text after the last '#' with the answer."""

    def final_answer(completion: str) -> str | None:
        _, marker, given = completion.rpartition("#")
        return given.strip() if marker else None

    return Scorer(lambda completion, answer: float(final_answer(completion) == answer), final_answer, "#{}".format)


def math() -> Scorer:
    """Compare the last boxed answer with the expected one by math-verify; without any box, the last answer it finds.

    A last box that does not close is no answer: the completion was cut off, or is malformed. `score` raises ValueError
    if the expected answer cannot be read. math-verify's own timeouts are off: the pool's time limit is the only one, so
    `final_answer` is for completions that were scored within it.
    """
    try:
        from math_verify import parse, verify
    except ImportError:
        raise ImportError("math-verify is not installed: pip install 'specjax[hf]'") from None
    # It would warn in every worker that its timeouts are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def parsed(text: str) -> list[Any]:
        return parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]

    def given(completion: str) -> list[Any]:
        box = last_box(completion)  # given several, math-verify would take them together or the first
        return parsed(completion if box is None else box)

    def score(completion: str, answer: str) -> float:
        expected = parsed(boxed(answer))
        if not expected:
            raise ValueError(f"cannot read the answer {answer!r}")
        return float(verify(expected, given(completion), timeout_seconds=None))

    def final_answer(completion: str) -> str | None:
        answers = given(completion)
        return str(answers[0]) if answers else None

    return Scorer(score, final_answer, boxed)


def boxed(answer: str) -> str:
    """Return the answer in a box, as a model is asked to give it."""
    return f"\\boxed{{{answer}}}"


def last_box(text: str) -> str | None:
    r"""Return the last `\boxed{..}` of a text, "" if it does not close, and None if there is none.

    A brace after a backslash is a character of the answer.
    """
    openings = list(re.finditer(r"\\boxed\s*(\{|[^\s{]\S*)", text))
    if not openings:
        return None
    start, opened = openings[-1].span()
    if openings[-1].group(1) != "{":  # \boxed 5
        return text[start:opened]
    depth = 1
    for brace in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, opened):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[start : brace.end()]
    return ""


def regex(pattern: str) -> Scorer:
    """Compare the first group that took part in the last match with the answer, surrounding spaces ignored.

    A pattern without groups scores whether it matches, and has no final answer.
    """
    compiled = re.compile(pattern)
    if not compiled.groups:
        return Scorer(lambda completion, answer: float(compiled.search(completion) is not None))

    def final_answer(completion: str) -> str | None:
        matches = list(compiled.finditer(completion))
        if not matches:
            return None
        return next((group for group in matches[-1].groups() if group is not None), "").strip()

    return Scorer(lambda completion, answer: float(final_answer(completion) == answer.strip()), final_answer)


def whole_format(pattern: str) -> Scorer:
    """Score whether the whole completion matches; a dot matches line ends too."""
    compiled = re.compile(pattern, re.DOTALL)
    return Scorer(lambda completion, answer: float(compiled.fullmatch(completion) is not None))


NAMED: dict[str, Callable[..., Scorer]] = {"exact": exact, "math": math, "regex": regex, "format": whole_format}


def load_scorer(name: str, pattern: str | None = None) -> Scorer:
    """Return the scorer of that name, or the function that "package.module:name" names.

    pattern: the regular expression of `regex` and `format`. A function's final answer is the function `final_answer` of
    its module. Raises ConfigError if there is no such function, and whatever a built-in scorer needs and does not find.
    """
    if name in NAMED:
        return NAMED[name]() if pattern is None else NAMED[name](pattern)
    function = load_function("reward.scorer", name, NAMED)
    return Scorer(function, getattr(sys.modules[name.partition(":")[0]], "final_answer", None))

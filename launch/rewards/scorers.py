"""Scorers by name. This module imports nothing heavy, because every scorer process loads it."""

import inspect
import logging
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, SupportsFloat

from launch.cli.errors import ConfigError
from launch.cli.functions import load_function

# The name of a function that was passed to `launch.trainer.train` begins so.
FUNCTION = "python:"
# End of the message about a scorer that returned anything else.
MUST_RETURN = "must return a number, True or False, or None for no reward"


class Scorer(NamedTuple):
    """A scorer: the value of a completion, and the final answer in it.

    Attributes:
        score:        (completion, answer or problem) -> a number; above 0.5 is correct.
        final_answer: completion -> the answer in it, None if it gives none. None: the scorer extracts none.
        stating:      answer -> a completion that states it and must score 1.0. None if the scorer has no fixed form.
        of_problem:   `score` takes the whole problem in place of the answer.
    """

    score: Callable[[str, Any], Any]
    final_answer: Callable[[str], str | None] | None = None
    stating: Callable[[str], str] | None = None
    of_problem: bool = False

    def __call__(self, completion: str, problem: str | dict[str, Any]) -> Any:
        """Return the value of a completion. problem: {"prompt", "answer", "columns"}, or only the answer."""
        if isinstance(problem, str):
            problem = {"prompt": "", "answer": problem, "columns": {}}
        return self.score(completion, problem if self.of_problem else problem["answer"])


def exact() -> Scorer:
    """Compare the text after the last '#' with the answer."""

    def final_answer(completion: str) -> str | None:
        _, marker, answer = completion.rpartition("#")
        return answer.strip() if marker else None

    return Scorer(lambda completion, answer: float(final_answer(completion) == answer), final_answer, "#{}".format)


def math() -> Scorer:
    """Compare the last boxed answer with the expected one by math-verify; without a box, the last answer it finds.

    A last box that does not close is not an answer: the completion was cut off, or is malformed. `score` raises
    ValueError if the expected answer cannot be read. math-verify's own timeouts are off because the pool has a time
    limit. So call `final_answer` only on completions that were scored within that limit.
    """
    try:
        from math_verify import parse, verify
    except ImportError:
        raise ImportError("math-verify is not installed: pip install -e '.[hf]' in the clone") from None
    # Otherwise every worker warns that math-verify's timeouts are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def parsed(text: str) -> list[Any]:
        return parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]

    def answers_in(completion: str) -> list[Any]:
        box = last_box(completion)  # of several boxes, math-verify would take the first, or all together
        return parsed(completion if box is None else box)

    def score(completion: str, answer: str) -> float:
        expected = parsed(boxed(answer))
        if not expected:
            raise ValueError(f"cannot read the answer {answer!r}")
        return float(verify(expected, answers_in(completion), timeout_seconds=None))

    def final_answer(completion: str) -> str | None:
        answers = answers_in(completion)
        return str(answers[0]) if answers else None

    return Scorer(score, final_answer, boxed)


def boxed(answer: str) -> str:
    r"""Return the answer as `\boxed{answer}`, the form in which models are asked to give it."""
    return f"\\boxed{{{answer}}}"


def last_box(text: str) -> str | None:
    r"""Return the last `\boxed{..}` of a text, "" if it does not close, and None if there is none.

    A brace after a backslash is part of the answer.
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
    """Compare the answer with the first group that took part in the last match, ignoring surrounding spaces.

    A pattern without groups only scores whether it matches, and has no final answer.
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
    """Score 1.0 if the whole completion matches, else 0.0. A dot also matches line ends."""
    compiled = re.compile(pattern, re.DOTALL)
    return Scorer(lambda completion, answer: float(compiled.fullmatch(completion) is not None))


NAMED: dict[str, Callable[..., Scorer]] = {"exact": exact, "math": math, "regex": regex, "format": whole_format}


def option_of(index: int) -> str:
    """Return the option that names the scorer of this index among those that read text; the main one is first."""
    return "reward.also" if index else "reward.scorer"


def load_scorer(name: str, pattern: str | None = None, option: str = "reward.scorer") -> Scorer:
    """Return the scorer of that name, or the function that "package.module:name" names.

    If the function's module also has a function `final_answer`, it is the scorer's. Raises ConfigError if there is no
    such function, and ImportError if a built-in scorer needs a package that is not installed.

    pattern: regular expression for `regex` and `format`. option: for error messages.
    """
    if name.startswith(FUNCTION):
        raise ConfigError(
            f"reward.scorer = {name}: was a function of a script; give --reward.scorer package.module:name, "
            "or in Python train(.., resume=True)"
        )
    if name in NAMED:
        return NAMED[name]() if pattern is None else NAMED[name](pattern)
    function = load_function(option, name, NAMED)
    final_answer = getattr(sys.modules[name.partition(":")[0]], "final_answer", None)
    return scorer_of(function, final_answer, f"{option} = {name}")


def scorer_of(
    function: Callable[..., Any], final_answer: Callable[[str], str | None] | None = None, owner: str = "reward"
) -> Scorer:
    """Return the scorer that a function is. If its second parameter is named `problem`, it gets the whole problem.

    Raises ConfigError, beginning with `owner`, if it cannot be called with two arguments.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a function of C
        return Scorer(function, final_answer)
    try:
        signature.bind("", "")
    except TypeError as error:
        raise ConfigError(
            f"{owner}: takes {signature}: {error}; must take (completion, problem) or (completion, answer): "
            "it is called for each completion"
        ) from None
    return Scorer(function, final_answer, of_problem=[*signature.parameters][1:2] == ["problem"])


class NoValue(Exception):
    """Raised if a scorer returned None, which is allowed, so that the sample has no reward."""


class NotANumber(TypeError):
    """Raised if a scorer returned text, a list or another thing that is never a reward."""


def as_number(returned: Any) -> float:
    """Return what a scorer returned as a float. Raises NoValue or NotANumber.

    Scalars of numpy and JAX are numbers. Text is none, although float() reads it.
    """
    if returned is None:
        raise NoValue("returned None")
    if isinstance(returned, SupportsFloat) and not getattr(returned, "ndim", 0):
        return float(returned)
    value = " ".join(repr(returned).split())[:80]
    raise NotANumber(f"returned {type(returned).__name__}: {value}; {MUST_RETURN}")

"""Scorers by name. This module imports nothing heavy, because every scorer process loads it."""

import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, SupportsFloat

from launch.cli.functions import load_function
from launch.errors import ConfigError
from launch.rewards.answers import Completion
from launch.rewards.arguments import Arguments, arguments_of
from launch.rewards.boxes import stated_answers
from launch.rewards.math_answers import MathScorer

# The name of a function that was passed to `launch.trainer.train` begins so.
FUNCTION = "python:"
# End of the message about a scorer that returned anything else.
MUST_RETURN = "must return a number, True or False, or None for no reward"


class Scorer(NamedTuple):
    """A scorer: the value of a completion, and the final answer in it.

    Attributes:
        score:        (text, expected answer) -> a number; above 0.5 is correct. A function of one's own as it is.
        final_answer: text -> the answer in it, None if it gives none. None: the scorer extracts none.
        stating:      answer -> texts that state it and must score 1.0. None if the scorer has no fixed form.
        whole:        The text is all of the completion, not its answer.
        arguments:    What `score` takes, if it is a function of one's own.
    """

    score: Callable[..., Any]
    final_answer: Callable[[str], str | None] | None = None
    stating: Callable[[str], list[str]] | None = None
    whole: bool = False
    arguments: Arguments | None = None

    def __call__(self, completion: Completion, problem: str | dict[str, Any]) -> Any:
        """Return the value of a completion; without an answer 0.0, unless the scorer reads all of the text.

        problem: {"prompt", "answer", "columns"}, or only the answer. A function of one's own gets "" for no answer.
        """
        if isinstance(problem, str):
            problem = {"prompt": "", "answer": problem, "columns": {}}
        text, answer = completion.text, completion.answer
        if self.arguments is not None:
            values = {"completion": answer or "", "whole_text": text, "answer": problem["answer"], "problem": problem}
            return self.arguments.call(self.score, values)
        if not self.whole and answer is None:
            return 0.0
        return self.score(text if self.whole else answer, problem["answer"])


def exact() -> Scorer:
    """Compare the text after the last '#' with the answer."""

    def final_answer(completion: str) -> str | None:
        _, marker, answer = completion.rpartition("#")
        return answer.strip() if marker else None

    def stated(answer: str) -> list[str]:
        return [f"#{answer}"]

    return Scorer(lambda completion, answer: float(final_answer(completion) == answer), final_answer, stated)


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
    return Scorer(lambda completion, answer: float(compiled.fullmatch(completion) is not None), whole=True)


def math() -> Scorer:
    """Compare the last boxed answer with the expected one by math-verify (`MathScorer`)."""
    scorer = MathScorer()
    return Scorer(scorer.score, scorer.final_answer, stated_answers)


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
    """Return the scorer that a function is. Its parameters get what their names say (`arguments_of`).

    Raises ConfigError, beginning with `owner`, if it takes other parameters.
    """
    return Scorer(function, final_answer, arguments=arguments_of(function, owner))


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

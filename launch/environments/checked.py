"""A user's environment whose faults become failures. Imports nothing heavy: every episode's process loads it."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from launch.environments.answers import Failure, Step, TextEnvironment
from launch.errors import first_line, one_line
from launch.rewards.scorers import NotANumber, NoValue, as_number

# A call of an environment, and what it gives unless it fails.
CallName = Literal["begin", "step", "end"]
Answer = Step | float | None

LONGEST_OBSERVATION = 8_000_000  # bytes, as JSON


class WrongAnswer(Exception):
    """Raised if an environment returned what it may not. The message says what is allowed."""


class CheckedEnvironment:
    """An environment of which no call raises. Not thread-safe.

    make: returns a new environment; it is called at `begin`.
    """

    def __init__(self, make: Callable[[], TextEnvironment]) -> None:
        self._make = make
        self._environment: TextEnvironment | None = None

    def call(self, name: CallName, *arguments: Any) -> Answer | Failure:
        """Call a function of the environment and return `check_answer`'s value; a Failure if one of them raises.

        arguments: begin(problem, seed), step(turn), end().
        """
        try:
            if name == "begin":
                self._environment = self._make()
            if name != "step" and not hasattr(self._environment, name):
                return check_answer(name, None)
            return check_answer(name, getattr(self._environment, name)(*arguments))
        except WrongAnswer as error:
            return Failure("failed", str(error))
        except BaseException as error:  # SystemExit and KeyboardInterrupt too
            return Failure("failed", _describe(error))


def check_answer(name: CallName, returned: Any) -> Answer:
    """Return what an environment's function returned: None of begin, a Step of step, a float of end.

    An observation is what JSON gives back. What UTF-8 cannot encode in it becomes a question mark.

    Raises WrongAnswer if the function may not return it.
    """
    match name:
        case "begin":
            if returned is not None:
                raise WrongAnswer(f"begin {_returned(returned)}; must return nothing")
            return None
        case "step":
            return _step(returned)
        case "end":
            return 0.0 if returned is None else _reward("end returned", returned)


def _step(returned: Any) -> Step:
    match returned:
        case Step():
            step = returned
        case str():
            step = Step(returned)
        case None:
            step = Step(done=True)
        case _:
            raise WrongAnswer(f"step {_returned(returned)}; must return a Step, text, or None at the end")
    if step.done not in (True, False):
        raise WrongAnswer(f"step: done = {one_line(repr(step.done), 80)}; must be True or False")
    observation = "" if step.done else _observation(step.observation)
    return Step(observation, _reward("step: reward =", step.reward), bool(step.done))


def _observation(observation: Any) -> str | list[dict[str, Any]]:
    wrong = f"step: observation = {one_line(repr(observation), 80)}"
    must = 'must be text, or messages of JSON with "role" and "content"'
    if not isinstance(observation, str):
        if not isinstance(observation, Sequence) or not all(map(_is_message, observation)):
            raise WrongAnswer(f"{wrong}; {must}")
        observation = list(map(dict, observation))
    try:
        text = json.dumps(observation, ensure_ascii=False).encode(errors="replace")
    except (TypeError, ValueError, RecursionError) as error:
        raise WrongAnswer(f"{wrong}: {first_line(error)}; {must}") from None
    if len(text) > LONGEST_OBSERVATION:
        raise WrongAnswer(f"step: the observation has {len(text)} bytes; must have at most {LONGEST_OBSERVATION}")
    return json.loads(text)


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("role"), str) and "content" in message


def _reward(owner: str, reward: Any) -> float:
    try:
        value = as_number(reward)
    except (NoValue, NotANumber):
        value = math.nan
    if not math.isfinite(value):
        raise WrongAnswer(f"{owner} {one_line(repr(reward), 80)}; must be a finite number")
    return value


def _returned(value: Any) -> str:
    return f"returned {type(value).__name__}: {one_line(repr(value), 80)}"


def _describe(error: BaseException) -> str:
    """Return an exception's type and the first line of its message, which may raise too."""
    try:
        return f"{type(error).__name__}: {first_line(error)}"
    except Exception:
        return type(error).__name__

"""A scorer process: `python -m launch.rewards.worker SCORERS PATTERNS FD`, started and killed by `launch.rewards.pool`.

SCORERS is a list of names and PATTERNS the regular expressions of those that have one, by name, both as JSON. It reads
lists of (completion, answer) from the pipe FD and writes one message a sample: the value of each scorer, or in text why
one has none. The first message, once the scorers are imported, is None, or in text why they cannot be. It imports
nothing heavy of its own: what it costs to start is what the scorers cost.
"""

import ctypes
import importlib
import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, SupportsFloat

from launch.rewards.patterns import regex_answer, whole_format

Scorer = Callable[[str, str], Any]

NAMED = {"exact": "launch.data.arithmetic:exact_answer", "math": "launch.rewards.math_answer:math_answer"}
OF_PATTERN: dict[str, Callable[[str], Scorer]] = {"regex": regex_answer, "format": whole_format}


def load_scorer(name: str, patterns: Mapping[str, str]) -> Scorer:
    """The function that `name` stands for, or that "package.module:function" leads to.

    Raises LookupError where there is none, and whatever importing the module raises.
    """
    if name in OF_PATTERN:
        return OF_PATTERN[name](patterns[name])
    module_name, colon, function_name = NAMED.get(name, name).partition(":")
    if not (module_name and colon and function_name):
        raise LookupError(f"must be {', '.join([*NAMED, *OF_PATTERN])} or package.module:function")
    scorer = getattr(importlib.import_module(module_name), function_name, None)
    if not callable(scorer):
        raise LookupError(f"{module_name} has no function {function_name}")
    return scorer


def serve(scorers: Sequence[Scorer], pipe: Connection) -> None:
    """Score what comes down the pipe until its other end closes."""
    try:
        while True:
            for completion, answer in pipe.recv():
                pipe.send(_values(scorers, completion, answer))
    except (EOFError, ConnectionError):
        return


def _values(scorers: Sequence[Scorer], completion: str, answer: str) -> list[float] | str:
    values = []
    for scorer in scorers:
        value = _value(scorer, completion, answer)
        if isinstance(value, str):
            return value
        values.append(value)
    return values


def _value(scorer: Scorer, completion: str, answer: str) -> float | str:
    try:
        value = scorer(completion, answer)
        # float() would take text as well.
        return float(value) if isinstance(value, SupportsFloat) else f"returned {type(value).__name__}: not a number"
    except Exception as error:
        return f"raised {type(error).__name__}: {error!s:.200}"


def _die_with_parent() -> None:
    # A scorer that hangs never looks at its pipe; the kernel ends it even then.
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def main(names: str, patterns: str, descriptor: str) -> None:
    _die_with_parent()
    pipe = Connection(int(descriptor))
    scorers = []
    for name in json.loads(names):
        try:
            scorers.append(load_scorer(name, json.loads(patterns)))
        except Exception as error:
            said = str(error) if isinstance(error, LookupError) else f"{type(error).__name__}: {error}"
            pipe.send(f"scorer={name!r}: {said}")
            return
    pipe.send(None)
    serve(scorers, pipe)


if __name__ == "__main__":
    main(*sys.argv[1:])

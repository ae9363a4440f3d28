"""A scorer process: `python -m launch.reward_worker SCORER FD`, started and killed by `launch.rewards`.

It reads lists of (completion, answer) from the pipe FD and writes one message a sample: its value, or in text why it
has none. The first message, once the scorer is imported, is None, or in text why it cannot be. It imports nothing heavy
of its own: what it costs to start is what the scorer costs.
"""

import ctypes
import importlib
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, SupportsFloat

Scorer = Callable[[str, str], Any]

NAMED = {"exact": "launch.arithmetic:exact_answer", "math": "launch.math_answer:math_answer"}


def load_scorer(name: str) -> Scorer:
    """The function that `name` stands for, or that "package.module:function" leads to.

    Raises LookupError where there is none, and whatever importing the module raises.
    """
    module_name, colon, function_name = NAMED.get(name, name).partition(":")
    if not (module_name and colon and function_name):
        raise LookupError(f"must be {', '.join(NAMED)} or package.module:function")
    scorer = getattr(importlib.import_module(module_name), function_name, None)
    if not callable(scorer):
        raise LookupError(f"{module_name} has no function {function_name}")
    return scorer


def serve(scorer: Scorer, pipe: Connection) -> None:
    """Score what comes down the pipe until its other end closes."""
    try:
        while True:
            for completion, answer in pipe.recv():
                pipe.send(_value(scorer, completion, answer))
    except (EOFError, ConnectionError):
        return


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


def main(name: str, descriptor: str) -> None:
    _die_with_parent()
    pipe = Connection(int(descriptor))
    try:
        scorer = load_scorer(name)
    except Exception as error:
        pipe.send(str(error) if isinstance(error, LookupError) else f"{type(error).__name__}: {error}")
        return
    pipe.send(None)
    serve(scorer, pipe)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A scorer process: `python -m launch.rewards.worker SCORERS FD`, started and killed by `launch.rewards.pool`.

SCORERS is JSON: (name, regular expression or null) of each scorer. The process reads lists of (completion, answer) from
the pipe FD and writes one message per sample: the value of each scorer, or as text why one has none. The first message,
once the scorers are imported, is None, or as text why they cannot be. It imports nothing heavy of its own: starting it
costs what the scorers cost.
"""

import ctypes
import json
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, SupportsFloat

from launch.cli.errors import ConfigError
from launch.rewards.scorers import load_scorer

Score = Callable[[str, str], Any]


def serve(scores: Sequence[Score], pipe: Connection) -> None:
    """Score what comes down the pipe until its other end closes."""
    try:
        while True:
            for completion, answer in pipe.recv():
                pipe.send(_values(scores, completion, answer))
    except (EOFError, ConnectionError):
        return


def _values(scores: Sequence[Score], completion: str, answer: str) -> list[float] | str:
    values = []
    for score in scores:
        try:
            value = score(completion, answer)
            # float() would take text as well.
            if not isinstance(value, SupportsFloat):
                return f"returned {type(value).__name__}: not a number"
            values.append(float(value))
        except Exception as error:
            return f"raised {type(error).__name__}: {error!s:.200}"
    return values


def _die_with_parent() -> None:
    # A scorer that hangs never looks at its pipe; the kernel ends it even then.
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def main(scorers: str, descriptor: str) -> None:
    _die_with_parent()
    pipe = Connection(int(descriptor))
    scores = []
    for name, pattern in json.loads(scorers):
        try:
            scores.append(load_scorer(name, pattern).score)
        except Exception as error:
            expected = isinstance(error, ConfigError)
            pipe.send(str(error) if expected else f"reward.scorer = {name}: {type(error).__name__}: {error}")
            return
    pipe.send(None)
    serve(scores, pipe)


if __name__ == "__main__":
    main(*sys.argv[1:])

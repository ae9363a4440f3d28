"""A scorer process: `python -m launch.rewards.worker SCORERS FD`, started and killed by `launch.rewards.process`.

SCORERS is JSON: [name, regular expression or null] for each scorer. FD is the socket to the pool.

Protocol: the process first sends [process id, null] after it has imported the scorers, or [process id, text] with the
reason why it could not. The pool then sends requests [request number, [[completion, answer], ..]]. The process answers
with one message per sample: [request number, index, process id, result]. A result is a list with each scorer's value,
or text with the reason why there is none.

This module imports nothing heavy, so that a process starts as fast as its scorers allow.
"""

import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any, SupportsFloat

from launch.cli.errors import ConfigError
from launch.rewards.channel import Channel
from launch.rewards.keeper import keep
from launch.rewards.scorers import load_scorer

Score = Callable[[str, str], Any]


def serve(scores: Sequence[Score], channel: Channel) -> None:
    """Answer the pool's requests until the pool closes its end."""
    this_process = os.getpid()
    try:
        while True:
            request, samples = channel.receive()
            for index, (completion, answer) in enumerate(samples):
                result = _values(scores, completion, answer)
                if os.getpid() != this_process:  # a scorer forked, and its child returned here
                    os._exit(1)
                channel.send([request, index, this_process, result])
    except (EOFError, ConnectionError):
        return


def _values(scores: Sequence[Score], completion: str, answer: str) -> list[float] | str:
    values = []
    for score in scores:
        try:
            value = score(completion, answer)
            # float() would also accept text.
            if not isinstance(value, SupportsFloat):
                return f"returned {type(value).__name__}, which is not a number"
            values.append(float(value))
        except Exception as error:
            return f"raised {type(error).__name__}: {error!s:.200}"
    return values


def _work(scorers: str, end: socket.socket) -> None:
    # Child processes of a scorer must not hold the channel open or write to it.
    os.register_at_fork(after_in_child=end.close)
    channel = Channel(end)
    scores = []
    for name, pattern in json.loads(scorers):
        try:
            scores.append(load_scorer(name, pattern).score)
        except Exception as error:
            expected = isinstance(error, ConfigError)
            channel.send(
                [os.getpid(), str(error) if expected else f"reward.scorer = {name}: {type(error).__name__}: {error}"]
            )
            return
    channel.send([os.getpid(), None])
    serve(scores, channel)


def main(scorers: str, descriptor: str) -> None:
    """Serve in a forked process. This process becomes its keeper."""
    end = socket.socket(fileno=int(descriptor))
    end.set_inheritable(False)
    keep(lambda: _work(scorers, end), release=end.close)


if __name__ == "__main__":
    main(*sys.argv[1:])

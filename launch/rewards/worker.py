"""The program of a worker: `python -m launch.rewards.worker SCORERS FD`, started by `launch.rewards.workers`.

It is two processes: a guard (`launch.jobs.guard`), and one that runs the scorers.

SCORERS is JSON: [name, regular expression or null] for each scorer. FD is a socket to the pool, which carries JSON, one
message per line. The worker sends [process id, index] before it imports a scorer, [process id, null] after the last
one, or [process id, text] with the reason why it could not. The pool then sends requests [request number,
[[text, answer or null, problem], ..]]: a completion's text, the answer in it, and its problem as an object or only the
text of its answer. The worker answers with one message per sample: [request number, index, process id, result]. A
result is a list with each scorer's value, or text with the reason why there is none.

This module imports nothing heavy, so that a worker starts as fast as its scorers allow.
"""

import json
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from launch.errors import ConfigError
from launch.jobs.guard import run_guarded
from launch.rewards.answers import Completion
from launch.rewards.scorers import NotANumber, NoValue, Scorer, as_number, load_scorer, option_of

RECEIVED_BYTES = 2**20  # at a time


def main(scorers: str, descriptor: str) -> None:
    """Serve in a process with a guard. Return after it and all processes that it started have ended."""
    run_guarded(lambda end: serve(json.loads(scorers), end), int(descriptor))


def serve(scorers: Sequence[tuple[str, str | None]], end: socket.socket) -> None:
    """Import the scorers and answer the pool's requests until the pool closes its end."""
    # Child processes of a scorer must not hold the socket open or write to it.
    os.register_at_fork(after_in_child=end.close)
    this_process = os.getpid()

    def send(*message: object) -> None:
        end.sendall(json.dumps(message).encode() + b"\n")

    loaded, received = list[Scorer](), b""
    with suppress(ConnectionError):
        for index, (name, pattern) in enumerate(scorers):
            send(this_process, index)
            option = option_of(index)
            try:
                loaded.append(load_scorer(name, pattern, option))
            except BaseException as error:
                expected = isinstance(error, ConfigError)
                reason = str(error) if expected else f"{option} = {name}: {type(error).__name__}: {error}"
                return send(this_process, reason)
        send(this_process, None)
        while data := end.recv(RECEIVED_BYTES):
            *requests, received = (received + data).split(b"\n")
            for number, samples in map(json.loads, requests):
                for index, (text, answer, problem) in enumerate(samples):
                    result = _values(loaded, Completion(text, answer), problem)
                    if os.getpid() != this_process:  # a scorer forked, and its child returned here
                        os._exit(1)
                    send(number, index, this_process, result)


def _values(scorers: Sequence[Scorer], completion: Completion, problem: str | dict[str, Any]) -> list[float] | str:
    values = []
    for scorer in scorers:
        try:
            values.append(as_number(scorer(completion, problem)))
        except (NoValue, NotANumber) as error:
            return str(error)
        except BaseException as error:  # SystemExit and KeyboardInterrupt too
            return f"raised {type(error).__name__}: {error!s:.200}"
    return values


if __name__ == "__main__":
    main(*sys.argv[1:])

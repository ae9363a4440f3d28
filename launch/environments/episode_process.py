"""The process of one episode, which a nursery forks."""

import json
import os
import random
import socket
import sys
from collections.abc import Callable

from launch.environments.answers import Failure, TextEnvironment
from launch.environments.checked import CheckedEnvironment

RECEIVED_BYTES = 2**20  # at a time


def serve_episode(make: Callable[[], TextEnvironment], end: socket.socket) -> None:
    """Answer the launcher's requests until it closes its end of the socket, or the environment has ended.

    Messages are JSON, one per line. Requests are [index, name of a function of the environment, arguments], answers
    [index, reason of a failure or null, what `CheckedEnvironment.call` returned].
    """
    # Child processes of an environment must not hold the socket open or write to it.
    os.register_at_fork(after_in_child=end.close)
    this_process, environment, received = os.getpid(), CheckedEnvironment(make), b""
    while data := end.recv(RECEIVED_BYTES):
        *requests, received = (received + data).split(b"\n")
        for index, name, arguments in map(json.loads, requests):
            if name == "begin":
                _seed_generators(arguments[1])
            answer = environment.call(name, *arguments)
            if os.getpid() != this_process:  # the environment forked, and its child returned here
                os._exit(1)
            reason, value = (answer.reason, None) if isinstance(answer, Failure) else (None, answer)
            message = json.dumps([index, reason, value], ensure_ascii=False)
            end.sendall(message.encode(errors="replace") + b"\n")
            if name == "end":
                return


def _seed_generators(seed: int) -> None:
    """Seed the generators of random numbers that all forks would share, so that an episode depends on its seed."""
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)

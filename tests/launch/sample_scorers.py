"""Scorers that misbehave on demand. Worker processes import them."""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress

NOT_A_FUNCTION = 1


def by_command(completion: str, answer: str) -> float:
    """Execute the command in the completion."""
    command, _, argument = completion.partition(" ")
    match command:
        case "value":
            return float(argument)
        case "raise":
            raise ValueError(argument)
        case "hang":
            time.sleep(60)
        case "exit":
            os._exit(1)
        case "sys_exit":
            sys.exit(argument)
        case "interrupt":
            raise KeyboardInterrupt
        case "print":
            print("x\n" * int(argument), end="")
            return 1.0
        case "text":
            return "1.0"  # pyright: ignore[reportReturnType]
        case "imported":
            return float(argument in sys.modules)
        case "fork":  # the child returns too
            os.fork()
            return float(argument)
        case "fork_raise":
            if os.fork() == 0:
                raise ValueError("in the child")
            return float(argument)
        case "scribble":  # what a library that closes or reuses descriptors does
            for descriptor in range(3, 64):
                with suppress(OSError):
                    os.write(descriptor, argument.encode() + b"\n")
        case "forge":  # a message of the right sample, read from the worker's own frames
            send, caller = sys._getframe(2).f_locals["send"], sys._getframe(2).f_locals
            send(caller["number"], caller["index"], os.getpid(), json.loads(argument))
        case "daemon":
            environment = {} if argument == "bare" else None
            return float(subprocess.Popen(["sleep", "60"], start_new_session=True, env=environment).pid)
        case "orphan":  # its parent ends at once
            start = ["sh", "-c", "sleep 60 >/dev/null & echo $!"]
            return float(subprocess.run(start, start_new_session=True, env={}, stdout=subprocess.PIPE).stdout)
        case "pid":
            return float(os.getpid())
    return None  # pyright: ignore[reportReturnType]


def by_answer(completion: str, answer: str) -> float:
    """Execute the command in the answer."""
    return by_command(answer, completion)


def before_the_mark(completion: str, answer: str) -> float:
    return float(completion.partition("#")[0])


def beyond_squares(completion: str, answer: str) -> float:
    """Return a number that float32 can hold, but not its square, so that the norm of a gradient overflows."""
    return 1e30 * (sum(map(ord, completion)) % 2)

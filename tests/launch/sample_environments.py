"""Environments that misbehave on demand. Episodes' processes import them."""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from launch.environments.answers import Step

NOT_A_FUNCTION = 1
DEEP = [[]]
for _ in range(10**5):
    DEEP = [DEEP]
# What a step may not return, and what is no answer of it.
WRONG: dict[str, Any] = {
    "tuple": ("text", 1.0, False),
    "number": 1.0,
    "nan": Step("x", float("nan")),
    "reward": Step("x", "1.0"),  # pyright: ignore[reportArgumentType]
    "none": Step("x", None),  # pyright: ignore[reportArgumentType]
    "done": Step("x", 0.0, "no"),  # pyright: ignore[reportArgumentType]
    "observation": Step(3),  # pyright: ignore[reportArgumentType]
    "messages": Step([{"content": "without a role"}]),
    "object": Step([{"role": "tool", "content": object()}]),
    "deep": Step([{"role": "tool", "content": DEEP}]),
    "long": "x" * 9_000_000,
}


class ByCommand:
    """Executes the commands in turns, which may also be those of the problem: {"begin", "end"} in its columns."""

    def begin(self, problem: dict[str, Any], seed: int) -> None:
        self._problem, self._seed, self._turns = problem, seed, list[str]()
        if "begin" in problem["columns"]:
            self.step(problem["columns"]["begin"])

    def step(self, turn: str) -> Any:
        self._turns.append(turn)
        command, _, argument = turn.partition(" ")
        return getattr(self, f"_{command}")(argument)

    def end(self) -> Any:
        if "end" in self._problem["columns"]:
            return self.step(self._problem["columns"]["end"])

    def _echo(self, argument: str) -> str:
        return f"{self._problem['answer']} {self._seed} {self._turns}"

    def _pid(self, argument: str) -> str:
        return str(os.getpid())

    def _parent(self, argument: str) -> str:
        return str(os.getppid())

    def _number(self, argument: str) -> float:
        return float(argument)

    def _reward(self, argument: str) -> Step:
        return Step(reward=float(argument), done=True)

    def _wrong(self, argument: str) -> Any:
        return WRONG[argument]

    def _none(self, argument: str) -> None:
        return None

    def _say(self, argument: str) -> str:
        return argument

    def _letters(self, argument: str) -> str:
        return argument * 1_000_000

    def _messages(self, argument: str) -> Step:
        return Step(({"role": "tool", "content": (1, "é\ud800")},), 2)

    def _imported(self, argument: str) -> str:
        return str(argument in sys.modules)

    def _descriptors(self, argument: str) -> str:
        return str(len(os.listdir("/proc/self/fd")))

    def _raise(self, argument: str) -> None:
        raise {"exit": SystemExit, "interrupt": KeyboardInterrupt}.get(argument, ValueError)(f"{argument}\nmore")

    def _touch(self, argument: str) -> None:
        Path(argument).touch()

    def _change(self, argument: str) -> str:
        self._problem["columns"]["changed"] = True
        return ""

    def _hang(self, argument: str) -> None:
        """Write the process's id to a file, and ignore what would end it politely."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path(argument).write_text(str(os.getpid()))
        while True:
            time.sleep(60)

    def _exit(self, argument: str) -> None:
        os._exit(int(argument))

    def _kill(self, argument: str) -> None:
        """Kill this process, its parent, or the group of one of them."""
        pid = os.getppid() if "parent" in argument else os.getpid()
        if "group" in argument:
            os.killpg(os.getpgid(pid), signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)
        signal.pause()

    def _print(self, argument: str) -> str:
        print("x\n" * int(argument), end="")
        os.write(1, b"one\n")
        os.write(2, b"two\n")
        return "printed"

    def _scribble(self, argument: str) -> str:
        """Do what a library that closes or reuses descriptors does."""
        for descriptor in range(3, 64):
            with suppress(OSError):
                os.write(descriptor, argument.encode().decode("unicode_escape").encode() + b"\n")
        return "scribbled"

    def _close(self, argument: str) -> str:
        os.closerange(3, 64)
        return "closed"

    def _forge(self, argument: str) -> str:
        """Send a message instead of the answer, found in the frames of this process."""
        caller = sys._getframe(3).f_locals
        line = argument.replace("INDEX", str(caller["index"]))
        caller["end"].sendall(line.encode() + b"\n")
        return "forged"

    def _flood(self, argument: str) -> None:
        end = sys._getframe(3).f_locals["end"]
        while True:
            end.sendall(b"x" * 2**16)

    def _fork(self, argument: str) -> str:
        """Return twice."""
        return "child" if os.fork() == 0 else "parent"

    def _fork_raise(self, argument: str) -> str:
        if os.fork() == 0:
            raise ValueError("in the child")
        return "parent"

    def _daemon(self, argument: str) -> str:
        return str(subprocess.Popen(["sleep", "600"], start_new_session=True, env={}).pid)

    def _orphan(self, argument: str) -> str:
        start = ["sh", "-c", "sleep 600 >/dev/null & echo $!"]
        return subprocess.run(start, start_new_session=True, env={}, stdout=subprocess.PIPE).stdout.decode().strip()

    def _meet(self, argument: str) -> str:
        """Wait until so many episodes are here."""
        directory, count = argument.split()
        Path(directory, str(self._seed)).touch()
        while len(os.listdir(directory)) < int(count):
            time.sleep(0.001)
        return "met"


class FaultyOnce(ByCommand):
    """Answers turns by their numbers, with a reward of 1. In the second it executes the command of its problem."""

    def step(self, turn: str) -> Any:
        number = len(self._turns) + 1
        if number == 2 and self._problem["columns"]["fault"]:
            return super().step(self._problem["columns"]["fault"])
        self._turns.append(turn)
        return Step(f"{number}:", 1.0)


class Nines:
    """Answers with nines, and with a reward of 1 if its problem has an answer."""

    def begin(self, problem: dict[str, Any], seed: int) -> None:
        self._reward = float(bool(problem["answer"]))

    def step(self, turn: str) -> Step:
        return Step("99999", self._reward)


class Seeded:
    """Answers with numbers that follow from the seed, and with rewards of the same kind."""

    def begin(self, problem: dict[str, Any], seed: int) -> None:
        self._random = random.Random(seed)

    def step(self, turn: str) -> Step:
        return Step(str(self._random.randrange(100)), self._random.random())

    def end(self) -> float:
        return self._random.random()


class Clocked(Seeded):
    """Answers with the time."""

    deterministic = False

    def step(self, turn: str) -> Step:
        return Step(str(time.time_ns()))


class Grid(ByCommand):
    """An environment in text that has the names of one in JAX."""

    width = 3


class WithoutBeginAndEnd:
    def step(self, turn: str) -> str:
        return turn


class BeginsWithText(WithoutBeginAndEnd):
    def begin(self, problem: dict[str, Any], seed: int) -> str:
        return "hello"


class StepsWithoutTurn:
    def step(self) -> str:
        return ""


def unmade() -> None:
    raise RuntimeError("cannot be made")


def not_an_environment() -> int:
    return 1


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: First number.
        b: Second number.
    """
    return a + b


def bare(a: int) -> int:
    return a

"""Episodes of environments that names find, each in a process of its own.

An environment may hang, die, fork, print, or write to any descriptor of its process. Nothing that its process sends is
trusted: messages are JSON, never pickle, and waits and lengths are limited.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from launch.environments.answers import Failure, Step
from launch.environments.checked import LONGEST_OBSERVATION, Answer, CallName, WrongAnswer, check_answer
from launch.environments.limited import CLOSED, Ended, Host, LimitedEpisodes
from launch.environments.nurseries import Forked, Nursery
from launch.environments.specs import named_functions
from launch.errors import ConfigError, one_line
from launch.jobs.guarded import STOP_LIMIT_S, PrintedLines

_LONGEST_MESSAGE = LONGEST_OBSERVATION + 2**16  # bytes


class ProcessEpisodes(LimitedEpisodes):
    """Episodes of environments that a spec names, each in a process of its own.

    One process imports the user's modules, and forks one for each episode. It is replaced if it dies. The modules must
    not start threads. `random` and numpy.random are seeded with the episode's seed.

    spec: {"environment": "package.module:name"}, a class or function without arguments that returns an environment; or
          {"tools": [name, ..], "calls": the format in which the model calls them}.
    call_s, episode_s: limits in seconds of one call of an environment, and of all calls of an episode together.

    Raises ConfigError if a function cannot be imported.
    """

    def __init__(self, spec: Mapping[str, Any], call_s: float, episode_s: float) -> None:
        (option, *_), names = zip(*named_functions(spec), strict=True)
        self._spec = spec
        self._current: Nursery | None = None
        self._printed = PrintedLines(f"{option} = {', '.join(names)}")
        super().__init__(call_s, episode_s)
        refused = self.submit(self._refusal).result()
        if refused is not None:
            self.close()
            raise ConfigError(str(refused))

    def new_host(self) -> Host:
        """Return a place for one environment."""
        return _EnvironmentProcess(self._nursery)

    async def stop(self) -> None:
        """Stop all environments, and wait until all calls are answered."""
        for host in list(self.hosts):
            host.stop(CLOSED)
        if self._current is not None:
            self._current.lose("was closed")
        await super().stop()
        self._printed.close()

    async def _nursery(self) -> Nursery:
        """Return the nursery, a new one if it has ended. Raises Ended if it cannot start."""
        if self._current is None or self._current.lost is not None:
            try:
                self._current = Nursery(self._spec, self._printed.descriptor)
            except OSError as error:
                raise Ended(f"could not start: {error}") from None
        nursery = self._current
        if (reason := await nursery.ready()) is not None:
            raise Ended(reason)
        return nursery

    async def _refusal(self) -> str | None:
        """Return why the functions cannot be imported; None if they can."""
        try:
            await self._nursery()
        except Ended as ended:
            return str(ended)


class _EnvironmentProcess(Host):
    def __init__(self, nursery: Callable[[], Awaitable[Nursery]]) -> None:
        self._new_nursery = nursery
        self._nursery: Nursery | None = None
        self._forked: Forked | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._index = 0
        self._stopped: str | None = None

    async def start(self) -> None:
        try:
            self._nursery = await self._new_nursery()
            self._forked = await self._nursery.fork()
        except Ended as ended:
            raise Ended(self._stopped or str(ended)) from None
        self._reader, self._writer = await asyncio.open_connection(sock=self._forked.end, limit=_LONGEST_MESSAGE)
        if self._stopped is not None:
            self.stop(self._stopped)
            raise Ended(self._stopped)

    async def call(self, name: CallName, *arguments: Any) -> Answer | Failure:
        if self._stopped is not None:
            raise Ended(self._stopped)
        assert self._writer is not None
        self._index += 1
        try:
            self._writer.write(json.dumps([self._index, name, arguments]).encode() + b"\n")
            await self._writer.drain()
            line = await self._reader.readline()
        except ValueError:
            raise Ended(f"its process sent a message of more than {_LONGEST_MESSAGE} bytes") from None
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            raise Ended(await self._reason())
        try:
            return self._answer(name, json.loads(line))
        except (ValueError, RecursionError):
            raise Ended("its process sent a malformed message") from None

    def stop(self, reason: str) -> None:
        self._stopped = reason
        if self._nursery is not None and self._forked is not None:
            self._nursery.kill(self._forked.number)
        if self._writer is not None:
            self._writer.transport.abort()

    def _answer(self, name: CallName, message: Any) -> Answer | Failure:
        """Return the environment's answer in a message. Raises ValueError if it is not the answer to the last call."""
        match message:
            case [self._index, str(reason), None]:
                return Failure("failed", one_line(reason, 300))
            case [self._index, None, value]:
                try:
                    return check_answer(name, Step(*value) if name == "step" else value)
                except (WrongAnswer, TypeError):
                    pass
        raise ValueError

    async def _reason(self) -> str:
        """Return why the process answers no more, which the nursery reports."""
        assert self._forked is not None
        if self._stopped is None:
            await asyncio.wait([self._forked.ended], timeout=STOP_LIMIT_S)
        if self._stopped is not None:
            return self._stopped
        return self._forked.ended.result() if self._forked.ended.done() else "its process closed its socket"

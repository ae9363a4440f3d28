"""Episodes of environments in this process: objects of a notebook or a script."""

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from launch.environments.answers import Failure
from launch.environments.checked import Answer, CallName, CheckedEnvironment
from launch.environments.limited import Ended, Host, LimitedEpisodes


class ThreadEpisodes(LimitedEpisodes):
    """Episodes of environments of this process, each in a daemon thread of its own.

    A call that does not end in time is answered by a failure, but its thread cannot be stopped: it goes on until the
    program ends. `ProcessEpisodes` stops such calls, and keeps this process from what environments do.

    make: returns a new environment; it is called in the episode's thread.
    call_s, episode_s: limits in seconds of one call of an environment, and of all calls of an episode together.
    """

    def __init__(self, make: Callable[[], Any], call_s: float, episode_s: float) -> None:
        self._make = make
        super().__init__(call_s, episode_s)

    def new_host(self) -> Host:
        """Return a place for one environment."""
        return _EnvironmentThread(self._make)


class _EnvironmentThread(Host):
    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        # None ends the thread.
        self._calls = queue.SimpleQueue[tuple[CallName, tuple[Any, ...], asyncio.Future[Answer | Failure]] | None]()
        self._answering: asyncio.Future[Answer | Failure] | None = None
        self._stopped: str | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            threading.Thread(target=self._serve, args=(loop,), daemon=True, name="environment").start()
        except RuntimeError as error:  # there are too many
            raise Ended(str(error)) from None

    async def call(self, name: CallName, *arguments: Any) -> Answer | Failure:
        if self._stopped is not None:
            raise Ended(self._stopped)
        self._answering = asyncio.get_running_loop().create_future()
        self._calls.put((name, arguments, self._answering))
        return await self._answering

    def stop(self, reason: str) -> None:
        self._stopped = reason
        self._calls.put(None)
        if self._answering is not None and not self._answering.done():
            self._answering.set_exception(Ended(reason))

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        environment = CheckedEnvironment(self._make)
        while (call := self._calls.get()) is not None:
            name, arguments, answering = call
            answer = environment.call(name, *arguments)
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_answer, answering, answer)


def _answer(answering: asyncio.Future[Answer | Failure], answer: Answer | Failure) -> None:
    if not answering.done():
        answering.set_result(answer)

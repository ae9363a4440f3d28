"""Episodes whose calls run in order and within time limits, wherever their environments are."""

import asyncio
import atexit
import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Protocol, Self, TypeVar

from launch.environments.answers import Failure, Step
from launch.environments.checked import Answer, CallName
from specjax.environments import at_once

T = TypeVar("T")

OVER, CLOSED = "the episode is over", "the episodes are closed"


class Ended(Exception):
    """Raised if an environment has ended and answers no more. The message says why."""


class Host(Protocol):
    """The place of one environment. It is used in the thread of the event loop only."""

    async def start(self) -> None:
        """Make the place, without a call of the environment. Raises Ended if there will be none."""
        ...

    async def call(self, name: CallName, *arguments: Any) -> Answer | Failure:
        """Return what `CheckedEnvironment.call` returns there. Raises Ended."""
        ...

    def stop(self, reason: str) -> None:
        """End the environment. A call that waits raises Ended with the reason."""
        ...


class LimitedEpisodes(ABC):
    """Episodes whose calls are coroutines of an event loop, which runs in a daemon thread.

    call_s, episode_s: limits in seconds of one call of an environment, and of all calls of an episode together.
    """

    def __init__(self, call_s: float, episode_s: float) -> None:
        self.call_s, self.episode_s = call_s, episode_s
        self.hosts = set[Host]()
        self._lock, self._closed = threading.Lock(), False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="episodes")
        self._thread.start()
        atexit.register(self.close)

    @abstractmethod
    def new_host(self) -> Host:
        """Return a place for one environment."""

    def begin(self, problem: dict[str, Any], seed: int) -> "LimitedEpisode":
        """Return a new episode at once. A failure of its beginning is the answer to its calls.

        problem: {"prompt", "answer", "columns"}. The environment gets a copy. Raises TypeError if JSON cannot hold it.
        """
        return LimitedEpisode(self, json.loads(json.dumps(problem)), seed)

    def submit(self, call: Callable[[], Coroutine[Any, Any, T]]) -> Future[T | Failure]:
        """Run a coroutine in the loop. After `close` the answer is a failure."""
        with self._lock:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(call(), self._loop)
        return at_once(Failure("failed", CLOSED))

    def close(self) -> None:
        """End all episodes. Calls that wait are answered by a failure."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            stopped = asyncio.run_coroutine_threadsafe(self.stop(), self._loop)
        stopped.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        atexit.unregister(self.close)

    async def stop(self) -> None:
        """Stop all environments, and wait until all calls are answered."""
        for host in list(self.hosts):
            host.stop(CLOSED)
        if calls := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(calls)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class LimitedEpisode:
    """One completion's conversation with an environment of its own, in `LimitedEpisodes`.

    Its calls run one after the other, in the order in which they are made, beside calls of other episodes. A failure is
    the answer to all later calls. `end` must be called in any case.
    """

    def __init__(self, episodes: LimitedEpisodes, problem: dict[str, Any], seed: int) -> None:
        self._episodes, self._host = episodes, episodes.new_host()
        self._in_order = asyncio.Lock()
        self._spent_s = 0.0
        # The answer to all later calls. The environment may still run, and is then told of the end.
        self._failure: Failure | None = None
        episodes.submit(lambda: self._begin(problem, seed))

    def step(self, turn: str) -> Future[Step | Failure]:
        """Return the answer to a turn. The future never raises."""
        return self._episodes.submit(lambda: self._step(turn))

    def end(self) -> Future[float | Failure]:
        """End the episode and return its last reward, 0.0 if it has none. The future never raises."""
        return self._episodes.submit(self._end)

    async def _begin(self, problem: dict[str, Any], seed: int) -> None:
        async with self._in_order:
            self._episodes.hosts.add(self._host)
            try:
                await self._host.start()
            except Ended as ended:
                self._stop(Failure("failed", str(ended)))
            else:
                await self._call("begin", problem, seed)

    async def _step(self, turn: str) -> Step | Failure:
        async with self._in_order:
            answer = await self._call("step", turn) if self._failure is None else None
            if isinstance(answer, Step):
                return answer
            assert self._failure is not None
            return self._failure

    async def _end(self) -> float | Failure:
        async with self._in_order:
            # Also after an exception, so that the environment can free what it holds.
            last = await self._call("end") if self._host in self._episodes.hosts else None
            failure = self._failure
            self._stop(Failure("failed", OVER))
            if failure is not None:
                return failure
            assert isinstance(last, float)
            return last

    async def _call(self, name: CallName, *arguments: Any) -> Answer:
        """Return the environment's answer. None, and a failure is noted, if there is none in time."""
        episodes, loop = self._episodes, asyncio.get_running_loop()
        left_s, began = episodes.episode_s - self._spent_s, loop.time()
        answering = asyncio.ensure_future(self._host.call(name, *arguments))
        in_time, _ = await asyncio.wait([answering], timeout=min(episodes.call_s, left_s))
        self._spent_s += loop.time() - began
        if not in_time:
            of_episode = "" if episodes.call_s <= left_s else " in all calls of the episode"
            limit_s = episodes.episode_s if of_episode else episodes.call_s
            self._stop(Failure("timed_out", f"no answer within {limit_s:g} s{of_episode}"))
        try:
            answer = await answering
        except Ended as ended:
            self._stop(Failure("failed", str(ended)))
            return None
        if isinstance(answer, Failure):
            self._failure = self._failure or answer
            return None
        return answer if in_time else None

    def _stop(self, failure: Failure) -> None:
        self._failure = self._failure or failure
        self._episodes.hosts.discard(self._host)
        self._host.stop(failure.reason)

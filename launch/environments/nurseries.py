"""The launcher's end of a nursery."""

import asyncio
import itertools
import json
import os
import socket
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from launch.environments.limited import Ended
from launch.environments.specs import named_functions
from launch.jobs.guarded import START_LIMIT_S, end_guard, start_guard

_RECEIVED_BYTES, _RECEIVED_DESCRIPTORS = 2**16, 16  # at a time
_LONGEST_MESSAGE = 2**16  # bytes
_DIED, _HUNG, _MIXED_UP = "died", f"gave no answer within {START_LIMIT_S:g} s", "sent an unexpected message"
_PARENT = "the process that forks the environments"
_TOO_MANY_FILES = "too many open files: raise the limit of this process (ulimit -n)"


class Forked(NamedTuple):
    """An episode's process: its number, the socket to it, and how it ended once it has."""

    number: int
    end: socket.socket
    ended: asyncio.Future[str]


class Nursery:
    """A process that imports what a spec names, and forks a process for each episode.

    It is used in the thread of a running event loop only. `launch.environments.nursery` describes the messages.

    output: descriptor for what the processes print. lost: what happened to it; None while it runs.

    Raises OSError if it cannot start.
    """

    def __init__(self, spec: Mapping[str, Any], output: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._names, self._importing = named_functions(spec), 0
        self._numbers = itertools.count()
        self._forks = dict[int, asyncio.Future[socket.socket]]()
        self._ends = dict[int, asyncio.Future[str]]()
        self._received, self._outgoing = b"", bytearray()
        # None in place of a descriptor that this process could not take.
        self._descriptors = deque[int | None]()
        # None: it is ready. Text: why it never will be.
        self._ready: asyncio.Future[str | None] = self._loop.create_future()
        self.lost: str | None = None
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._guard = start_guard("launch.environments.nursery", json.dumps(spec), theirs, output)
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self._receive)
        self._limit = self._loop.call_later(START_LIMIT_S, self.lose, _HUNG)

    async def ready(self) -> str | None:
        """Wait until the functions are imported. Return None, or a line that names the option that is wrong."""
        return await asyncio.shield(self._ready)

    async def fork(self) -> Forked:
        """Return a new process for an episode. Raises Ended if there is none."""
        if self.lost is not None:
            raise Ended(f"{_PARENT} {self.lost}")
        number = next(self._numbers)
        forking = self._forks[number] = self._loop.create_future()
        ended = self._ends[number] = self._loop.create_future()
        self._send("fork", number)
        limit = self._loop.call_later(START_LIMIT_S, self.lose, _HUNG)
        try:
            return Forked(number, await forking, ended)
        finally:
            limit.cancel()

    def kill(self, number: int) -> None:
        """Kill an episode's process and all that it started. Does nothing if it has ended."""
        if number in self._ends:
            self._send("kill", number)

    def lose(self, reason: str) -> None:
        """End the nursery, all episodes' processes, and all that they started. Does nothing if it has ended.

        reason: what happened to it.
        """
        if self.lost is not None:
            return
        self.lost = reason
        self._limit.cancel()
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        for descriptor in filter(None, self._descriptors):
            os.close(descriptor)
        end_guard(self._guard)
        if not self._ready.done():
            option, name = self._names[self._importing]
            self._ready.set_result(f"{option} = {name}: its process {reason} while it was imported; must be importable")
        for number in [*self._ends]:
            self._end(number, f"{_PARENT} {reason}")

    def _send(self, *message: Any) -> None:
        self._outgoing += json.dumps(message).encode() + b"\n"
        self._flush()

    def _flush(self) -> None:
        if self.lost is None:
            try:
                del self._outgoing[: self._socket.send(self._outgoing)]
            except BlockingIOError:
                pass
            except OSError:  # `_receive` finds that it has ended
                self._outgoing.clear()
            if self._outgoing:
                self._loop.add_writer(self._socket, self._flush)
            else:
                self._loop.remove_writer(self._socket)

    def _receive(self) -> None:
        try:
            data, descriptors, flags, _ = socket.recv_fds(self._socket, _RECEIVED_BYTES, _RECEIVED_DESCRIPTORS)
        except OSError:
            data, descriptors, flags = b"", [], 0
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        self._descriptors += descriptors
        if flags & socket.MSG_CTRUNC:
            self._descriptors.append(None)
        *lines, self._received = (self._received + data).split(b"\n")
        try:
            for line in lines:
                self._obey(json.loads(line))
        except (ValueError, RecursionError):
            self.lose(_MIXED_UP)
        if not data:
            self.lose(_DIED)
        if len(self._received) > _LONGEST_MESSAGE:
            self.lose(_MIXED_UP)

    def _obey(self, message: Any) -> None:
        """Note what the nursery reports. Raises ValueError if it is no report."""
        match message:
            case ["importing", int(index)] if 0 <= index < len(self._names):
                self._importing = index
            case ["ready"] if not self._ready.done():
                self._limit.cancel()
                self._ready.set_result(None)
            case ["refused", str(reason)] if not self._ready.done():
                self._ready.set_result(reason)
                self.lose(reason)
            case ["forked", int(number)] if number in self._forks and self._descriptors:
                descriptor = self._descriptors.popleft()
                if descriptor is None:
                    self.kill(number)
                    self._end(number, _TOO_MANY_FILES)
                else:
                    self._forks.pop(number).set_result(socket.socket(fileno=descriptor))
            case ["ended", int(number), str(reason)]:
                self._end(number, reason)
            case _:
                raise ValueError

    def _end(self, number: int, reason: str) -> None:
        if (ended := self._ends.pop(number, None)) is not None:
            ended.set_result(reason)
        if (forking := self._forks.pop(number, None)) is not None:
            forking.set_exception(Ended(reason))

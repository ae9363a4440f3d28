"""The program of a nursery: `python -m launch.environments.nursery SPEC FD`; `launch.environments.nurseries` starts it.

It is two processes: a guard (`launch.jobs.guard`), and the nursery, which imports a user's modules once and then forks
a process for each episode, so that an episode begins within milliseconds. The modules must not start threads: a fork
has none of them.

SPEC is JSON (`launch.environments.specs`). FD is a socket to the launcher, which carries JSON, one message per line.
The nursery sends ["importing", index] before it imports a function, ["ready"] after the last one, or ["refused", text]
with the reason why it could not. The launcher then sends ["fork", number of an episode] and ["kill", number]. The
nursery sends ["forked", number] with the descriptor of a socket to the episode's process (`serve_episode`), and
["ended", number, text] with the reason once that process has ended or could not be forked.
"""

import gc
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

from launch.cli.functions import load_function
from launch.environments.answers import TextEnvironment
from launch.environments.episode_process import RECEIVED_BYTES, serve_episode
from launch.environments.specs import environment_maker, named_functions
from launch.errors import ConfigError, first_line
from launch.jobs import guard


def main(spec: str, descriptor: str) -> None:
    """Serve in a process with a guard. Return after it and all processes that it started have ended."""
    guard.run_guarded(lambda end: serve(json.loads(spec), end), int(descriptor))


def serve(spec: Mapping[str, Any], end: socket.socket) -> None:
    """Import a spec's functions, and obey the launcher until it closes its end."""
    functions = list[Callable[..., Any]]()
    with suppress(ConnectionError):
        for index, (option, name) in enumerate(named_functions(spec)):
            _send(end, "importing", index)
            try:
                functions.append(load_function(option, name))
            except BaseException as error:
                expected = isinstance(error, ConfigError)
                reason = str(error) if expected else f"{option} = {name}: {type(error).__name__}: {first_line(error)}"
                return _send(end, "refused", reason)
        nursery = Nursery(environment_maker(spec, functions), end)
        _send(end, "ready")
        nursery.serve()


class Nursery:
    """Forks episodes' processes, and kills each with all that it started.

    An episode's process adopts the orphans of what it starts. When it ends, the kernel gives its children to the next
    process above it that adopts: this one. So it kills every child that is no episode's process, until none is left.
    """

    def __init__(self, make: Callable[[], TextEnvironment], end: socket.socket) -> None:
        self._make, self._end = make, end
        self._episodes = dict[int, int]()  # process id: number
        self._spared = set(guard.children())  # the modules started them, for all episodes
        guard.adopt_orphans()
        gc.collect()
        gc.freeze()  # so that collections in episodes' processes do not copy all pages
        self._woken, self._waking = socket.socketpair()
        self._woken.setblocking(False)
        self._waking.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waking.fileno(), warn_on_full_buffer=False)

    def serve(self) -> None:
        """Obey the launcher until it closes its end."""
        waiting, received = select.poll(), b""
        for readable in (self._end, self._woken):
            waiting.register(readable, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in waiting.poll()}
            if self._woken.fileno() in ready:
                self._woken.recv(RECEIVED_BYTES)
                self._collect()
            if self._end.fileno() in ready:
                if not (data := self._end.recv(RECEIVED_BYTES)):
                    return
                *messages, received = (received + data).split(b"\n")
                for command, number in map(json.loads, messages):
                    {"fork": self._fork, "kill": self._kill}[command](number)

    def _fork(self, number: int) -> None:
        try:
            ours, theirs = socket.socketpair()
            with ours, theirs:
                this_process = os.getpid()
                if (pid := os.fork()) == 0:
                    ours.close()
                    self._become_episode(this_process, theirs)
                self._episodes[pid] = number
                _send(self._end, "forked", number, descriptor=ours.fileno())
        except OSError as error:  # there are too many processes
            _send(self._end, "ended", number, f"could not start: {error.strerror}")

    def _become_episode(self, parent: int, end: socket.socket) -> NoReturn:
        code = 1
        try:
            guard.end_with_parent(signal.SIGKILL)
            if os.getppid() != parent:  # it ended before
                os._exit(1)
            guard.adopt_orphans()
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for other in (self._end, self._woken, self._waking):
                other.close()
            serve_episode(self._make, end)
            code = 0
        finally:
            os._exit(code)

    def _kill(self, number: int) -> None:
        for pid in [pid for pid, its_number in self._episodes.items() if its_number == number]:
            guard.kill(pid)

    def _collect(self) -> None:
        """Collect the processes that have ended, kill what they leave, and report episodes that are over."""
        ended = guard.ended_children()
        over = [(self._episodes.pop(pid), status) for pid, status in ended.items() if pid in self._episodes]
        for stray in {*guard.children()} - self._spared - self._episodes.keys():
            guard.kill(stray)
        for number, status in over:
            _send(self._end, "ended", number, _reason(status))


def _reason(status: int) -> str:
    """Return how a process ended, from its status as os.waitpid returns it."""
    code = os.waitstatus_to_exitcode(status)
    how = f"with exit code {code}" if code >= 0 else f"by signal {-code} ({signal.strsignal(-code)})"
    return f"its process ended {how}"


def _send(end: socket.socket, *message: Any, descriptor: int | None = None) -> None:
    line = json.dumps(message).encode() + b"\n"
    socket.send_fds(end, [line], [] if descriptor is None else [descriptor])


if __name__ == "__main__":
    main(*sys.argv[1:])

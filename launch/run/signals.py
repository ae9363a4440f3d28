"""A run that is told to stop: by a scheduler, with SIGTERM, or by a person, with Ctrl-C."""

import os
import signal
import socket
import threading
from collections.abc import Callable

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopping:
    """Within its block, the first of `SIGNALS` only sets `signal`, for a loop to look at; the second ends the process.

    It ends with exit code 128 + signal, in the midst of whatever it does: a thread sees to that, since Python calls the
    handlers of signals only between steps, which may take long to compile or to run.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.signal: signal.Signals | None = None
        self._say = say

    def __enter__(self) -> "Stopping":
        self._reading, self._writing = socket.socketpair()
        self._writing.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._writing.fileno())
        # Only a signal with a handler of Python's is written there.
        self._handlers = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        self._thread = threading.Thread(target=self._watch, daemon=True, name="signals")
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        self._writing.close()
        self._thread.join()
        self._reading.close()

    def _watch(self) -> None:
        while received := self._reading.recv(1):
            if received[0] not in SIGNALS:
                continue
            if self.signal is not None:
                os._exit(128 + received[0])
            self.signal = signal.Signals(received[0])
            self._say(f"{self.signal.name}: the run ends behind the step under way; a second one ends it at once")

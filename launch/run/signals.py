"""Stops a run on request: of a scheduler, by SIGTERM, or of a person, by Ctrl-C."""

import os
import signal
import socket
import threading
from collections.abc import Callable

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Within its block, the first of `SIGNALS` only sets `received`; a second one ends the process at once.

    The process then ends with exit code 128 + signal. A thread does it: Python runs signal handlers only between
    bytecodes, and one of these may compile or run a program for long.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.received: signal.Signals | None = None
        self._say = say

    def __enter__(self) -> "StopSignals":
        self._reading, self._writing = socket.socketpair()
        self._writing.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._writing.fileno())
        # Only a signal with a handler in Python is written there.
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
        while read := self._reading.recv(1):
            if read[0] not in SIGNALS:
                continue
            if self.received is not None:
                os._exit(128 + read[0])
            self.received = signal.Signals(read[0])
            self._say(
                f"{self.received.name}: finishing the current step, then saving and exiting; a second one exits at once"
            )

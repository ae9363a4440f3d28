"""Stop a run cleanly on SIGTERM (a scheduler) or SIGINT (Ctrl-C)."""

import os
import signal
import socket
import threading
from collections.abc import Callable

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Context manager in which the first signal only sets `received`, and a second one ends the process at once.

    The exit code is then 128 + signal.
    A thread reads the signals. Python runs signal handlers only between bytecodes, and a single bytecode may compile or
    run a program for minutes.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.received: signal.Signals | None = None
        self._say = say

    def __enter__(self) -> "StopSignals":
        self._reading, self._writing = socket.socketpair()
        self._writing.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._writing.fileno())
        # Python writes a signal to the wake-up descriptor only if it has a Python handler.
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

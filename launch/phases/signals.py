"""Clean stop of a run on SIGTERM (from a scheduler) or SIGINT (Ctrl-C)."""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import ClassVar

from specjax.parallel import processes

SIGNALS = (signal.SIGTERM, signal.SIGINT)
TOPIC = "signals"


class StopSignals:
    """Context manager in which the first signal only sets `received`, and a second one ends the work at once.

    A program of the command line then ends with exit code 128 + signal. Any other process belongs to the caller, who
    may have a notebook full of variables: the main thread raises KeyboardInterrupt. With several processes, all receive
    a signal to one of them. A thread reads the signals, because Python runs signal handlers only between bytecodes, and
    one bytecode may compile or run a program for minutes. Outside the main thread, where Python allows no handlers,
    signals keep their meaning.

    ending: message with which already the first signal ends the work at once, because nothing of it is saved. None: the
            work ends at a point of its own.
    """

    owns_process: ClassVar[bool] = False

    def __init__(self, say: Callable[[str], None], ending: str | None = None) -> None:
        self._ending, self._raising, self._raised = ending, False, False
        self._here: signal.Signals | None = None  # the first signal that this process received
        self._agreed: signal.Signals | None = None
        self._say = say

    @property
    def received(self) -> signal.Signals | None:
        """The first signal that any process received, or None. Every process must read it at the same points."""
        if self._agreed is None:
            first = self._here
            several = processes.count() > 1 or processes.in_subgroup()
            if several and processes.primary() and (messages := processes.read_messages(TOPIC)):
                first = signal.Signals(int(messages[0]))
            agreed = processes.agree(first)
            self._agreed = None if agreed is None else signal.Signals(agreed)
        return self._agreed

    def __enter__(self) -> "StopSignals":
        self._installed = threading.current_thread() is threading.main_thread()
        if not self._installed:
            return self
        self._reading, self._writing = socket.socketpair()
        self._writing.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._writing.fileno())
        # Python writes a signal to the wake-up descriptor only if it has a Python handler.
        self._handlers = {number: signal.signal(number, self._handle) for number in SIGNALS}
        self._thread = threading.Thread(target=self._watch, daemon=True, name="signals")
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._installed:
            return
        signal.set_wakeup_fd(self._wakeup)
        self._writing.close()
        try:
            self._thread.join()  # before the handlers go: its own signal is for them
        finally:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self._reading.close()

    def _watch(self) -> None:
        while data := self._reading.recv(1):
            if data[0] not in SIGNALS or self._raising:
                continue
            if self._ending is not None:
                self._try_to_say(f"{signal.Signals(data[0]).name}: {self._ending}")
            if self._here is not None or self._ending is not None:
                self._end(data[0])
                continue
            self._here = signal.Signals(data[0])
            processes.tell(TOPIC, str(data[0]))
            self._try_to_say(
                f"{self._here.name}: finishing what runs (a step, an evaluation, compiling), then saving and exiting; "
                f"a second one {'exits at once' if self.owns_process else 'raises KeyboardInterrupt'}"
            )

    def _end(self, number: int) -> None:
        if self.owns_process:
            os._exit(128 + number)
        self._raising = True
        # The handler may have run for all signals so far. A signal of our own also interrupts what the thread waits in.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def _handle(self, *_: object) -> None:
        # Called for the second signal, and for our own: only one of them raises.
        if self._raising and not self._raised:
            self._raised = True
            raise KeyboardInterrupt

    def _try_to_say(self, line: str) -> None:
        # Whoever read the output may be gone, and rich then raises SystemExit. The next signal must still be read.
        with suppress(Exception, SystemExit):
            self._say(line)


@contextmanager
def owning_process() -> Iterator[None]:
    """Let signals end the process during the block, which is a whole program."""
    before, StopSignals.owns_process = StopSignals.owns_process, True
    try:
        yield
    finally:
        StopSignals.owns_process = before

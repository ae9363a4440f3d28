"""Clock of compilation, from the events that jax reports for every program."""

import threading

import jax

from specjax.program import WAITED

# These stages do not overlap: jax reports no event for a function traced within another.
_STAGES = ("jaxpr_trace", "jaxpr_to_mlir_module", "backend_compile")
_EVENTS = {*(f"/jax/core/compile/{stage}_duration" for stage in _STAGES), WAITED}


class CompileClock:
    """Clock of the seconds that the thread which created it spends on programs that are not compiled yet.

    It traces them, compiles them, reads them from the compile cache, or waits for another thread that compiles them.
    """

    def __init__(self) -> None:
        self._seconds, self._thread = 0.0, threading.get_ident()
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def lap(self) -> float:
        """Return the seconds counted since the last call, or since the clock was created."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _hear(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event in _EVENTS and threading.get_ident() == self._thread:
            self._seconds += duration_secs

"""Clock of compilation, from the events that jax reports for every program."""

import jax

# These stages do not overlap: jax reports no event for a function traced within another.
_STAGES = ("jaxpr_trace", "jaxpr_to_mlir_module", "backend_compile")
_EVENTS = {f"/jax/core/compile/{stage}_duration" for stage in _STAGES}


class CompileClock:
    """Clock of the seconds spent on tracing programs and compiling them or reading them from the compile cache."""

    def __init__(self) -> None:
        self._seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def lap(self) -> float:
        """Return the seconds counted since the last call, or since the clock was created."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _hear(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event in _EVENTS:
            self._seconds += duration_secs

"""How long compiling took: jax tells of every program that it hands to the compiler."""

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileClock:
    """Seconds that the compiler, or reading what it made from the cache, has taken since the last look."""

    def __init__(self) -> None:
        self._seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def lap(self) -> float:
        """Since the last call, or since the clock was made."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _hear(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == _EVENT:
            self._seconds += duration_secs

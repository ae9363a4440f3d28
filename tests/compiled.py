"""Which functions are compiled, and whether ahead of their call."""

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from specjax import program


@contextmanager
def compilations() -> Iterator[list[tuple[str, bool]]]:
    """Yield a list that gets (function, was it started ahead) for each program that is compiled or read from the cache.

    `Program.start_compiling` starts ahead, whichever thread then compiles.
    """
    heard: list[tuple[str, bool]] = []
    # The checks of shapes wrap every function in frames of one and the same code.
    starter = inspect.unwrap(program._compile).__code__

    def hear(event: str, duration_secs: float, fun_name: str = "", **_: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            frame, ahead = sys._getframe(), False
            while frame is not None:
                ahead |= frame.f_code is starter
                frame = frame.f_back
            heard.append((fun_name.removeprefix("jit(").removesuffix(")"), ahead))

    jax.monitoring.register_event_duration_secs_listener(hear)
    try:
        yield heard
    finally:
        jax.monitoring.unregister_event_duration_listener(hear)


def compiled_late(heard: list[tuple[str, bool]]) -> set[str]:
    """Return the functions that their own call compiled."""
    return {name for name, ahead in heard if not ahead}

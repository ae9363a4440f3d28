"""Which functions are compiled, and by which thread."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def compilations() -> Iterator[list[tuple[str, str]]]:
    """Yield a list that gets (function, thread) for each program that is compiled, or read from the compile cache."""
    heard: list[tuple[str, str]] = []

    def hear(event: str, duration_secs: float, fun_name: str = "", **_: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            heard.append((fun_name.removeprefix("jit(").removesuffix(")"), threading.current_thread().name))

    jax.monitoring.register_event_duration_secs_listener(hear)
    try:
        yield heard
    finally:
        jax.monitoring.unregister_event_duration_listener(hear)


def compiled_late(heard: list[tuple[str, str]]) -> set[str]:
    """Return the functions that no thread of `specjax.program` compiled, but their callers."""
    return {name for name, thread in heard if not thread.startswith("compile")}

"""Programs that compile before they are called."""

import os
import threading
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from launch.cli.compilation import CompileClock
from specjax.program import Program, _threads, compiling_until_exit
from tests.specjax.training import mesh_of

ONE = mesh_of(1, 1, 1)


@pytest.fixture
def compiling() -> Iterator[list[str]]:
    """Yield the names of the threads that compiled, one for each program. Functions of a test must be its own."""
    threads: list[str] = []

    def hear(event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            threads.append(threading.current_thread().name)

    jax.monitoring.register_event_duration_secs_listener(hear)
    yield threads
    jax.monitoring.unregister_event_duration_listener(hear)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_call_finds_what_was_started_for_its_shapes(compiling: list[str], devices: int) -> None:
    mesh = mesh_of(devices, 1, 1)
    rows = NamedSharding(mesh, P("data"))
    program = Program(lambda x: {"doubled": 2 * x + devices}, mesh, out_shardings=rows)
    shapes = program.start_compiling(jax.ShapeDtypeStruct((4, 3), jnp.float32, sharding=rows))
    assert shapes == {"doubled": jax.ShapeDtypeStruct((4, 3), jnp.float32)}
    args = [jax.device_put(np.ones((count, 3), np.float32), rows) for count in (4, 8)]
    for count, x in enumerate(args, start=1):
        np.testing.assert_array_equal(program(x)["doubled"], 2 + devices)
        assert len(compiling) == count
    assert compiling[0].startswith("compile") and compiling[1] == threading.current_thread().name
    assert len(program.compiled) == 1 and program.compiled[0].seconds > 0


def test_a_call_waits_only_for_its_own_shapes_and_the_clock_counts_that() -> None:
    program, clock = Program(lambda x: x + 4.125, ONE), CompileClock()
    first, second = (jnp.ones(size) for size in (3, 5))
    for x in (first, second):
        program.start_compiling(x)
    clock.lap()
    program(first)
    assert clock.lap() > 0 and len(program.compiled) == 1
    program(first)
    assert clock.lap() == 0
    program(second)
    assert clock.lap() > 0 and len(program.compiled) == 2


def test_an_error_of_xla_is_raised_by_the_call() -> None:
    program = Program(lambda x: x + 5.25, ONE, compiler_options={"no_such_option": True})
    program.start_compiling(jnp.ones(3))
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        program(jnp.ones(3))


def test_what_waits_for_a_thread_can_be_dropped(compiling: list[str]) -> None:
    program, release = Program(lambda x: x + 6.375, ONE), threading.Event()
    for _ in range(os.cpu_count() or 1):
        _threads().submit(release.wait)
    with compiling_until_exit():
        program.start_compiling(jnp.ones(3))
        compiling.clear()
    release.set()
    np.testing.assert_array_equal(program(jnp.ones(3)), 7.375)
    assert compiling == [threading.current_thread().name]

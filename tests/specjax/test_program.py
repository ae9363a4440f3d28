"""Programs that compile before they are called."""

import os
import threading
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from launch.phases.compile_clock import CompileClock
from specjax.program import Program, _threads, dropping_compilations, finish_compiling
from tests.compiled import compilations, compiled_late
from tests.specjax.training import mesh_of

ONE = mesh_of(1, 1, 1)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_call_finds_what_was_started_for_its_shapes(devices: int) -> None:
    mesh = mesh_of(devices, 1, 1)
    rows = NamedSharding(mesh, P("data"))
    program = Program(lambda x: {"doubled": 2 * x + devices}, mesh, out_shardings=rows)
    shapes = program.start_compiling(jax.ShapeDtypeStruct((4, 3), jnp.float32, sharding=rows))
    assert shapes == {"doubled": jax.ShapeDtypeStruct((4, 3), jnp.float32)}
    args = [jax.device_put(np.ones((count, 3), np.float32), rows) for count in (4, 8)]
    program.wait(args[0])
    for count, x in enumerate(args):
        with compilations() as heard:
            np.testing.assert_array_equal(program(x)["doubled"], 2 + devices)
        assert len(heard) == count
    assert len(program.compiled) == 1 and program.compiled[0].seconds > 0


def test_what_is_started_again_is_compiled_once() -> None:
    program, x = Program(lambda x: x + 3.0625, ONE), jnp.ones(3)
    with compilations() as heard:
        for _ in range(3):
            program.start_compiling(x)
        finish_compiling()
        program(x)
    assert len(heard) == 1 and not compiled_late(heard)


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


@pytest.mark.parametrize("dropped", [False, True])
def test_what_waits_for_a_thread_waits_for_no_other_program(dropped: bool) -> None:
    offset, release, x = 6.375 + dropped, threading.Event(), jnp.ones(3)
    program = Program(lambda x: x + offset, ONE)
    try:
        with compilations() as heard:
            with dropping_compilations() if dropped else nullcontext():
                for _ in range(os.cpu_count() or 1):
                    _threads().submit(release.wait)
                program.start_compiling(x)
            np.testing.assert_array_equal(program(x), 1 + offset)
    finally:
        release.set()
    assert len(heard) == 1 and not compiled_late(heard)

"""Functions jitted for a mesh, whose compilation can begin before they are called."""

import os
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specjax import kernels
from specjax.types import PyTree

Result = TypeVar("Result")
# Event of `jax.monitoring`: seconds that a call waited for a compilation in a thread.
WAITED = "/specjax/program/wait_duration"


class Compilation(NamedTuple):
    """A compiled program and the seconds that XLA took, or that reading it from the compile cache took."""

    program: jax.stages.Compiled
    seconds: float


class Program(Generic[Result]):
    """Function jitted for a mesh, whose compilation can be started before it is called.

    XLA mostly uses one core for a program. After `start_compiling` it compiles in a thread, so that several compile
    side by side, and beside what runs; a call waits for it.

    Args:
        compute_dtype: dtype of a function that decodes, also among other work, for `kernels.compiler_options`.
        jit_options:   options of jax.jit.

    Attributes:
        compiled: what was started and waited for.
    """

    def __init__(
        self, run: Callable[..., Result], mesh: Mesh, *, compute_dtype: jnp.dtype | None = None, **jit_options: Any
    ) -> None:
        if compute_dtype is not None:
            # The mesh determines the platform that the options are for.
            with jax.set_mesh(mesh):
                options = kernels.compiler_options(compute_dtype)
            jit_options["compiler_options"] = options | jit_options.get("compiler_options", {})
        self._jitted, self._mesh = jax.jit(run, **jit_options), mesh
        # By shapes and dtypes of the arguments.
        self._compiling: dict[Hashable, _Started] = {}
        self.compiled: list[Compilation] = []

    def __call__(self, *args: PyTree) -> Result:
        """Return the result of a run. A mesh of several CPU devices has then ended it (`kernels.finished`)."""
        self.wait(*args)
        with jax.set_mesh(self._mesh):
            return kernels.finished(self._jitted(*args), self._mesh)

    def trace(self, *args: PyTree) -> jax.stages.Traced:
        """Return the traced program. args: arrays or ShapeDtypeStructs; the devices may be absent."""
        with jax.set_mesh(self._mesh):
            return self._jitted.trace(*args)

    def start_compiling(self, *args: PyTree) -> PyTree:
        """Start to compile for such arguments, and return the result's ShapeDtypeStructs, without shardings.

        A call with the same shapes, dtypes and shardings then neither traces nor compiles. On a mesh of several CPU
        devices this compiles before it returns: threads that compile are those that collectives wait for.

        args: arrays, or ShapeDtypeStructs with the shardings of the arrays to come.
        """
        # One at a time: jax would compile a lowered function twice.
        self.wait(*args)
        traced = self.trace(*args)
        with jax.set_mesh(self._mesh):
            lowered = traced.lower()
        started = _Started(lowered, _threads().submit(_compile, lowered))
        self._compiling[_signature(args)] = started
        _unfinished.add(started.future)
        started.future.add_done_callback(_unfinished.discard)
        if self._mesh.size > 1 and self._mesh.devices.flat[0].platform == "cpu":
            self.wait(*args)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), traced.out_info)

    def wait(self, *args: PyTree) -> None:
        """Wait for the compilation that was started for such arguments, if one was. Raises XLA's errors.

        One that has not begun is done here, so that it waits for no other program.
        """
        if not self._compiling or (started := self._compiling.pop(_signature(args), None)) is None:
            return
        if started.future.cancel():
            self.compiled.append(_compile(started.lowered))
            return
        start = time.perf_counter()
        self.compiled.append(started.future.result())
        jax.monitoring.record_event_duration_secs(WAITED, time.perf_counter() - start)


class _Started(NamedTuple):
    lowered: jax.stages.Lowered
    future: Future[Compilation]


# Of all programs.
_unfinished: set[Future[Compilation]] = set()


def finish_compiling() -> None:
    """Wait until no thread compiles, so that a measurement has the machine, and the GPU, to itself."""
    start = time.perf_counter()
    wait(list(_unfinished))
    jax.monitoring.record_event_duration_secs(WAITED, time.perf_counter() - start)


@contextmanager
def dropping_compilations() -> Iterator[None]:
    """Drop at exit the compilations that still wait for a thread: a process that ends would wait for them."""
    try:
        yield
    finally:
        _threads().shutdown(wait=False, cancel_futures=True)
        _threads.cache_clear()


@cache
def _threads() -> ThreadPoolExecutor:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return ThreadPoolExecutor(cores, "compile")


def _signature(args: PyTree) -> Hashable:
    return tuple((np.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(args))


def _compile(lowered: jax.stages.Lowered) -> Compilation:
    start = time.perf_counter()
    # jax keeps the program with the lowered function, and a call finds both.
    return Compilation(lowered.compile(), time.perf_counter() - start)

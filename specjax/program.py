"""Functions jitted for a mesh, whose compilation can begin before they are called."""

import os
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
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
        decodes_in:  compute dtype of a function that decodes: it is compiled with `kernels.compiler_options`.
        jit_options: options of jax.jit.

    Attributes:
        compiled: what was started and waited for.
    """

    def __init__(
        self, run: Callable[..., Result], mesh: Mesh, *, decodes_in: jnp.dtype | None = None, **jit_options: Any
    ) -> None:
        if decodes_in is not None:
            # The mesh determines the platform that the options are for.
            with jax.set_mesh(mesh):
                options = kernels.compiler_options(decodes_in)
            jit_options["compiler_options"] = options | jit_options.get("compiler_options", {})
        self._jitted, self._mesh = jax.jit(run, **jit_options), mesh
        # By the shapes of the arguments.
        self._compiling: dict[Hashable, Future[Compilation]] = {}
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
        traced = self.trace(*args)
        with jax.set_mesh(self._mesh):
            lowered = traced.lower()
        self._compiling[_shapes(args)] = _threads().submit(_compile, lowered)
        if self._mesh.size > 1 and self._mesh.devices.flat[0].platform == "cpu":
            self.wait(*args)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), traced.out_info)

    def wait(self, *args: PyTree) -> None:
        """Wait for the compilation that was started for arguments of these shapes, if one was. Raises XLA's errors."""
        if not self._compiling or (started := self._compiling.pop(_shapes(args), None)) is None:
            return
        start = time.perf_counter()
        if not started.cancelled():
            self.compiled.append(started.result())
        jax.monitoring.record_event_duration_secs(WAITED, time.perf_counter() - start)


@contextmanager
def compiling_until_exit() -> Iterator[None]:
    """Drop at exit the compilations that still wait for a thread: a process that ends would wait for them."""
    try:
        yield
    finally:
        _threads().shutdown(wait=False, cancel_futures=True)
        _threads.cache_clear()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), "compile")


def _shapes(args: PyTree) -> Hashable:
    return tuple(np.shape(x) for x in jax.tree.leaves(args))


def _compile(lowered: jax.stages.Lowered) -> Compilation:
    start = time.perf_counter()
    # jax keeps the program with the lowered function, and a call finds both.
    return Compilation(lowered.compile(), time.perf_counter() - start)

"""The one seam for everything that depends on the hardware.

`plain` holds every operation as one would write it on a board. A module named after a platform holds those functions,
with the same signature, that were measured to be faster there: `cpu` today. To tune one for GPUs, write
`specjax/kernels/gpu.py`, add it to `TUNED`, and add cases to tests/specjax/test_kernels.py. State in each function on
which version of jax and by which benchmark it was measured.

The platform is that of what is being traced: of the mesh that is set, or else jax's default one.
`SPECJAX_KERNELS=plain`, set before the program starts, leaves only `plain`: jax keeps what it has traced.
"""

import os
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import TypeVar, cast

import jax
from jax.sharding import Mesh

from specjax.kernels import cpu, plain
from specjax.types import PyTree

Operation = TypeVar("Operation", bound=Callable)

TUNED: dict[str, ModuleType] = {"cpu": cpu}


def _selected(reference: Operation) -> Operation:
    """Return an operation that calls, when traced, the tuned function of this name, or else `reference`."""

    @wraps(reference)
    def call(*args: object, **options: object) -> object:
        chosen = os.environ.get("SPECJAX_KERNELS")
        if chosen not in (None, "plain"):
            raise ValueError(f'SPECJAX_KERNELS = {chosen}: must be "plain" or unset')
        tuned = TUNED.get(_platform()) if chosen is None else None
        return getattr(tuned, reference.__name__, reference)(*args, **options)

    return cast(Operation, call)


def _platform() -> str:
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


matmul = _selected(plain.matmul)
matmul_transposed = _selected(plain.matmul_transposed)
attend = _selected(plain.attend)
write = _selected(plain.write)
while_loop = _selected(plain.while_loop)
switch = _selected(plain.switch)
argmax = _selected(plain.argmax)
computed_once = _selected(plain.computed_once)
compiler_options = _selected(plain.compiler_options)


def finished(result: PyTree, mesh: Mesh) -> PyTree:
    """Return what a program on this mesh returned; on several CPU devices, wait until it has ended.

    There a collective holds one thread of a pool with as many as there are cores. Of two programs under way, one may
    hold what the other waits for, and XLA ends the process after 40 seconds.
    """
    several = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"
    return jax.block_until_ready(result) if several else result

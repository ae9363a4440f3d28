"""Operations that depend on the hardware. All hardware-dependent code is in this package.

`plain` holds the reference implementation of every operation. A module named after a platform, `cpu` or `gpu`, holds
functions with the same signatures that were measured to be faster there. To tune another one, add it to that module and
add cases to tests/specjax/test_kernels.py. State in each function the version of jax and the benchmark it was measured
with.

The platform comes from the mesh that is set while tracing, or else from jax's default. Set `SPECJAX_KERNELS=plain` to
use only `plain`; set it before the program starts, because jax does not trace again when it changes.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING

import jax
from jax.sharding import Mesh

from specjax.kernels import cpu, gpu, plain
from specjax.kernels.cudnn import save_attention as save_attention
from specjax.types import PyTree

if TYPE_CHECKING:
    from specjax.kernels.plain import (
        argmax,
        attend,
        attend_packed,
        attend_rows,
        compiler_options,
        computed_once,
        grouped,
        matmul,
        matmul_quantized,
        matmul_transposed,
        run_if,
        switch,
        while_loop,
        write,
    )

__all__ = [
    "argmax",
    "attend",
    "attend_packed",
    "attend_rows",
    "compiler_options",
    "computed_once",
    "finished",
    "grouped",
    "matmul",
    "matmul_quantized",
    "matmul_transposed",
    "quick_draws",
    "run_if",
    "switch",
    "while_loop",
    "write",
]

TUNED: dict[str, ModuleType] = {"cpu": cpu, "gpu": gpu, "cuda": gpu}


def __getattr__(name: str) -> Callable:
    """Return the platform's tuned function of this name, or the plain one: `kernels.matmul` is looked up at each use.

    Raises AttributeError for other names, and ValueError for a bad SPECJAX_KERNELS.
    """
    if name not in __all__:
        raise AttributeError(f"specjax.kernels has no operation {name!r}")
    setting = os.environ.get("SPECJAX_KERNELS")
    if setting not in (None, "plain"):
        raise ValueError(f'SPECJAX_KERNELS = {setting}: must be "plain" or unset')
    tuned = TUNED.get(_platform()) if setting is None else None
    return getattr(tuned, name, getattr(plain, name))


def _platform() -> str:
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def finished(result: PyTree, mesh: Mesh) -> PyTree:
    """Return a program's result; on a mesh of several CPU devices, wait first until the program has ended.

    On CPUs a collective holds a thread of a pool that has one thread per core. Two programs that run at the same time
    can deadlock on it, and XLA ends the process after 40 seconds.
    """
    several = mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"
    return jax.block_until_ready(result) if several else result


@contextmanager
def quick_draws(mesh: Mesh) -> Iterator[None]:
    """Compile the random draws of a program for one GPU, within this context, as calls of jax's own kernel.

    The bits are the same. XLA compiles the generator once for each draw: 334 s on two cores for the parameters of
    Qwen3-8B, 43 s with this. Several devices would each draw whole arrays, so nothing changes for them.
    """
    option = "jax_threefry_gpu_kernel_lowering"
    before = getattr(jax.config, option)
    jax.config.update(option, mesh.size == 1)
    try:
        yield
    finally:
        jax.config.update(option, before)

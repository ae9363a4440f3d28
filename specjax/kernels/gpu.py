"""Kernels for NVIDIA GPUs. Programs compiled for one were read; attention was also timed (specjax.kernels.cudnn)."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.kernels import plain
from specjax.kernels.cudnn import attend as attend
from specjax.kernels.cudnn import attend_packed as attend_packed
from specjax.kernels.cudnn import attend_rows as attend_rows
from specjax.kernels.plain import State


def grouped(
    x: Float[Array, "M D"], weights: Float[Array, "groups D F"], sizes: Int[Array, "groups"]
) -> Float[Array, "M F"]:
    """Multiply as `plain.grouped` does; if the extra `tokamax` is installed, with its Triton kernel.

    The kernel stops at the last group, and needs no room for blocks. Compiled for an H100, with 65,536 rows of 128
    groups, the gradient takes 0.3 GiB of temporary memory. It has not run yet: `benchmarks.gpu.smoke` checks it.
    """
    # A program for a GPU that is not there cannot have it: tokamax asks jax for the device.
    if find_spec("tokamax") is None or jax.default_backend() == "cpu":
        return plain.grouped(x, weights, sizes)
    import tokamax  # pyright: ignore[reportMissingImports]

    # The kernel leaves rows after the last group unwritten, in the result and in the gradient.
    real = (jnp.arange(len(x)) < jnp.sum(sizes))[:, None]
    y = tokamax.ragged_dot(jnp.where(real, x, jnp.zeros((), x.dtype)), weights, sizes, implementation="triton")
    return jnp.where(real, y, jnp.zeros((), y.dtype))


def run_if(condition: Bool[Array, ""], branch: Callable[[State], State], state: State) -> State:
    """Run a branch as a loop of at most one turn, which updates the caches in place.

    XLA (jax 0.10.2) copies caches that a branch of a conditional writes: they take twice the memory.
    """

    def turn(carry: tuple[Array, State]) -> tuple[Array, State]:
        return jnp.zeros_like(condition), branch(carry[1])

    return jax.lax.while_loop(lambda carry: carry[0], turn, (condition, state))[1]


def switch(index: Int[Array, ""] | int, branches: Sequence[Callable[[State], State]], state: State) -> State:
    """Run the branches one after the other, each by `run_if`: all but one do nothing; none runs at another index."""
    for number, branch in enumerate(branches):
        state = run_if(jnp.asarray(index == number), branch, state)
    return state

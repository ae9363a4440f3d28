"""What the clock of the stages runs; that its stages are those of the fused step, test_meshes sees."""

import jax
import jax.numpy as jnp
from jax.experimental import io_callback

from specjax.probe import Clock


def test_a_program_runs_once_a_call_and_is_traced_once() -> None:
    runs, traced = [], []

    def counted(x: jax.Array) -> jax.Array:
        traced.append(0)
        io_callback(lambda: runs.append(0), None)
        return 2 * x

    clock = Clock(jnp.dtype("float32"))
    for count in (1, 2):
        result, seconds = clock("counted", counted, jnp.float32(3))
        assert result == 6 and seconds > 0
        jax.effects_barrier()
        assert (len(runs), len(traced)) == (count, 1)

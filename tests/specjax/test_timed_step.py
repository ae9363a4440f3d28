"""The stage timer. test_meshes.py checks that timed stages give the results of the fused step."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import io_callback

from specjax.train.timed_step import Clock


@pytest.mark.parametrize(("pure", "ran"), [(False, [1, 2]), (True, [2, 3])])
def test_a_pure_program_is_run_once_more_the_first_time(pure: bool, ran: list[int]) -> None:
    runs = []

    def counted(x: jax.Array) -> jax.Array:
        io_callback(lambda: runs.append(0), None)
        return 2 * x

    clock = Clock(jnp.dtype("float32"))
    for count in ran:
        result, seconds = clock("counted", counted, jnp.float32(3), pure=pure)
        assert result == 6 and seconds > 0
        jax.effects_barrier()
        assert len(runs) == count

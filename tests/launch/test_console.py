"""Console lines about chosen draft lengths, and the clock of compilation."""

import jax
import jax.numpy as jnp

from launch.cli.compilation import CompileClock
from launch.run.console import explain_choice
from specjax.cost import Acceptance, BatchProgress, Drafting
from specjax.rollout.plan import Phase


def test_a_choice_is_printed_with_its_reason() -> None:
    acceptance = Acceptance(jnp.full(2, 1e6), jnp.array([6e5, 3e5]), jnp.float32(0))
    trips = jnp.array([[0, 1e6], [0, 0]])
    drafting = Drafting(acceptance, BatchProgress(1.8 * trips, trips), jnp.array([[2.0, 3.0], [1.0, 3.8]]))
    first, second = explain_choice((Phase(8, 64), Phase(2, 96)), (0, 2), drafting).splitlines()
    said = "  draft length {} positions: acceptance length {} for the batch, at {} times".format
    assert first.startswith(said("2 at 8 slots of 64", "1.90, 1.80", "1.50"))
    assert first.endswith("speed by draft length 0: 1.00, 2: 1.20")
    assert second.startswith(said("0 at 2 slots of 96", "1.00, 1.00", "1.00"))
    assert second.endswith("0: 1.00, 2: 0.50")


def test_the_clock_counts_what_is_compiled_and_nothing_else() -> None:
    x = jax.random.normal(jax.random.key(0), 3)
    program = jax.jit(lambda x: jnp.sin(x) * 3.25)
    clock = CompileClock()
    program(x).block_until_ready()
    assert clock.lap() > 0
    program(x).block_until_ready()
    assert clock.lap() == 0

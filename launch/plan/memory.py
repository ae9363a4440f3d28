"""Memory per device while a compiled program of a step runs, by component."""

from functools import partial

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from launch.predict.memory import Parts, ProgramName, held, needed, program_mesh
from launch.setup.experiment import Experiment
from specjax.parallel.memory import bytes_per_device
from specjax.parallel.mesh import BATCH_AXES, batch_shards
from specjax.types import PyTree, TrainState

TEMPORARIES = "activations and other temporaries"
SECOND_GRADIENTS = "second copy of the gradients"
# Of what a program needs, what XLA counts with its other temporaries.
AMONG_TEMPORARIES = {
    "logits of a verification",
    "tokens of the rollout",
    "logits of a microbatch",
    "activations of a microbatch",
}


def components(
    name: ProgramName,
    experiment: Experiment,
    state: TrainState,
    batches: PyTree,
    compiled: jax.stages.Compiled,
    prepared: bool = False,
) -> Parts:
    """Return bytes per device by component while a program runs on its mesh.

    Weights, moments, copies, caches and gradients follow from shapes and shardings. Temporaries are the remainder of
    XLA's total for the program.

    batches:  the program's arguments after the state, as shapes. They are split by rows.
    prepared: the program gets the copy for the rollout in place of the state.
    """
    memory = compiled.memory_analysis()
    assert memory is not None
    batches = jax.tree.map(partial(_by_rows, program_mesh(name, experiment)), batches)
    # Count arguments here: XLA drops those that a program does not read, but they are in memory too.
    total = sum(held(name, experiment, state).values()) + bytes_per_device(batches)
    total += memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.temp_size_in_bytes
    known = known_components(name, experiment, state)
    if prepared:
        total += known["copy for the rollout"]
    spare = total - sum(known.values())
    if SECOND_GRADIENTS in known:
        # XLA may have found a way without it, or without a part.
        known[SECOND_GRADIENTS] += min(max(spare, -known[SECOND_GRADIENTS]), 0)
    return known | {TEMPORARIES: max(spare, 0)}


def known_components(name: ProgramName, experiment: Experiment, state: TrainState) -> Parts:
    """Return the components of `components` that follow from shapes and shardings, without compiling."""
    parts = {part: size for part, size in needed(name, experiment, state).items() if part not in AMONG_TEMPORARIES}
    # One is the sum over microbatches. The other is a microbatch's, and after the last one what is clipped.
    return parts | ({SECOND_GRADIENTS: parts["gradients"]} if name == "update" else {})


def _by_rows(mesh: Mesh, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return the argument split by rows, or whole if it has none that divide."""
    divides = x.shape and x.shape[0] % batch_shards(mesh) == 0
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P(BATCH_AXES) if divides else P()))

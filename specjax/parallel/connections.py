"""Connections between CPU devices, opened before programs need them."""

from itertools import combinations

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from specjax.parallel import processes


def connect(mesh: Mesh) -> Mesh:
    """Connect the devices of a CPU mesh along all combinations of its axes. Return the mesh. Every process calls it.

    XLA (jax 0.10.2) connects devices in their first collective, which fails if one of them comes 30 seconds after
    another: see scripts/first_collective.py. Processes that compile on busy cores may be further apart.
    """
    if processes.count() == 1 or mesh.size == 1 or mesh.devices.flat[0].platform != "cpu":
        return mesh
    axes = [axis for axis, size in mesh.shape.items() if size > 1]
    groups = [group for size in range(len(axes)) for group in combinations(axes, size + 1)]

    def add() -> list[jax.Array]:
        return [jax.lax.psum(jax.lax.axis_index(group), group) for group in groups]

    processes.gather(None)
    if processes.index() in processes.owners(mesh):
        jax.block_until_ready(jax.jit(jax.shard_map(add, mesh=mesh, in_specs=(), out_specs=P(), check_vma=False))())
    return mesh

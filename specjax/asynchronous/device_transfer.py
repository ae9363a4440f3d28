"""Arrays that move from the devices of one mesh to those of another."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from specjax.parallel import processes
from specjax.parallel.connections import connect
from specjax.types import PyTree

SIDES = "sides"


class Move:
    """Callable that moves arrays [1, ..] from the devices of one mesh to those of another. Nothing waits for them.

    Each device sends to the one at its place. Within a process that is a copy. With several processes it is a
    collective of each pair of devices, which every process calls, and which waits there for the programs before it.

    Args:
        source: mesh of the arrays, of the target's shape.
        target: mesh without a device of the source.
        shapes: of the arrays, as ShapeDtypeStructs.
        specs:  partition of each array over both meshes. The first axis is not divided.
    """

    def __init__(self, source: Mesh, target: Mesh, shapes: PyTree, specs: PyTree) -> None:
        self._pairs = list(zip(source.devices.flat, target.devices.flat, strict=True))
        self._target = shardings(target, specs)
        devices, types = np.stack([source.devices, target.devices]), (AxisType.Auto,) * (source.devices.ndim + 1)
        both = connect(Mesh(devices, (SIDES, *target.axis_names), axis_types=types))
        specs = jax.tree.map(lambda sharding: P(SIDES, *sharding.spec[1:]), self._target)
        self._mesh, self._both = both, shardings(both, specs)
        zeros = partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        self._blank = jax.jit(zeros, out_shardings=self._target)
        send = partial(jax.tree.map, lambda x: jax.lax.ppermute(x, SIDES, [(0, 1)]))
        self._send = jax.jit(jax.shard_map(send, mesh=both, in_specs=(specs,), out_specs=specs, check_vma=False))

    def __call__(self, tree: PyTree) -> PyTree:
        """Return the arrays on the target mesh."""
        if processes.count() == 1:
            return jax.tree.map(self._copy, tree, self._target)
        joined = jax.tree.map(_join, tree, self._blank(), self._both)
        with jax.set_mesh(self._mesh):
            return jax.tree.map(_second, self._send(joined), self._target)

    def _copy(self, x: jax.Array, sharding: NamedSharding) -> jax.Array:
        shards = _shards(x)
        parts = [jax.device_put(shards[a], b) for a, b in self._pairs]
        return jax.make_array_from_single_device_arrays(x.shape, sharding, parts)


def join_groups(groups: Mesh, axis: int, *parts: jax.Array) -> jax.Array:
    """Return one array [1, ..] of the parts [1, ..] on the groups of a mesh, which are along its first axis.

    axis: axis along which the array without its first axis is split. Piece s * groups + g is on device s of group g.
    Negative: every part is the whole array.
    """
    first, *_ = parts
    assert isinstance(first.sharding, NamedSharding)
    shards = {device: shard for part in parts for device, shard in _shards(part).items()}
    shape, axes = [*first.shape], [*first.sharding.spec]
    if axis >= 0:
        shape[axis + 1] *= len(parts)
        axes[axis + 1] = (*axes[axis + 1], groups.axis_names[0])
    return _assemble(tuple(shape), shards, NamedSharding(groups, P(*axes)), first.dtype)


def _join(first: jax.Array, second: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Return [2, ..] of the shards of both, without a copy."""
    return _assemble((2, *first.shape[1:]), _shards(first) | _shards(second), sharding, first.dtype)


def _second(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Return [1, ..] of the shards on the devices of the sharding."""
    return _assemble((1, *x.shape[1:]), _shards(x), sharding, x.dtype)


def _assemble(shape: tuple[int, ...], shards: dict[Any, jax.Array], sharding: NamedSharding, dtype: Any) -> jax.Array:
    own = [shards[device] for device in sharding.addressable_devices_indices_map(shape)]
    return jax.make_array_from_single_device_arrays(shape, sharding, own, dtype=dtype)


def _shards(x: jax.Array) -> dict[Any, jax.Array]:
    """Return the shards that this process has, by their devices."""
    return {shard.device: shard.data for shard in x.addressable_shards}


def shardings(mesh: Mesh, specs: PyTree) -> PyTree:
    """Return each partition as a sharding over the mesh."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P))

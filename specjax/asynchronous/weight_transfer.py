"""Arrays sent from one mesh to another, while both go on computing."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from specjax import kernels
from specjax.asynchronous.device_transfer import Move, join_groups, shardings
from specjax.options import nearest_divisors, nearest_multiples
from specjax.parallel.mesh import AXES, BATCH_AXES, batch_shards
from specjax.types import PyTree

GROUPS = "groups"
# In place of an axis: the array is not split.
WHOLE = -1


class Send:
    """Callable that computes arrays on one mesh and returns them on another. Nothing waits for the arrays.

    1. A program on the source mesh computes them, each in as many different parts as the target mesh has devices.
    2. Each part moves from one device to one device. A source device has a part for each group of a larger target mesh.
    3. A program on the target mesh gathers the parts over `data` and `fsdp`.

    An array without an axis that divides is copied whole. If the source mesh is larger, only the first of its equal
    groups sends.

    Args:
        make:   function that returns the arrays. Called with arrays on the source mesh, within a program.
        layout: sharding of each array on the target mesh, over no axis but the model axes.
        source: mesh on which the arrays are computed.
        target: mesh with other devices, of a size that `check_sizes` allows.
    """

    def __init__(self, make: Callable[..., PyTree], layout: PyTree, source: Mesh, target: Mesh) -> None:
        check_sizes(source, target)
        _, _, *model = target.devices.shape
        group = (min(source.size, target.size) // math.prod(model), 1, *model)
        self._source, self._target = source, target
        self._senders, self._receivers = (_mesh(mesh.devices.reshape(-1, *group)) for mesh in (source, target))
        self._make, self._layout = make, layout
        self._gather = jax.jit(partial(jax.tree.map, lambda x: x[0]), out_shardings=layout)
        self._scatter: Callable[..., list[PyTree]] | None = None
        self._moves: list[Move] = []
        self._split: PyTree = None

    def __call__(self, *args: Any) -> PyTree:
        """Return the arrays that `make` returns for these arguments, on the target mesh."""
        if self._scatter is None:
            self._scatter = self._build(*args)
        with jax.set_mesh(self._source):
            parts = kernels.finished(self._scatter(*args), self._source)
        moved = [move(part) for move, part in zip(self._moves, parts, strict=True)]
        whole = jax.tree.map(partial(join_groups, self._receivers), self._split, *moved)
        with jax.set_mesh(self._target):
            return kernels.finished(self._gather(whole), self._target)

    def _build(self, *args: Any) -> Callable[..., list[PyTree]]:
        """Build the moves for arguments like these. Return the program before them: arrays [1, ..] for each group."""
        count = len(self._receivers.devices)

        def part(x: Array, axis: int, number: int) -> Array:
            """Return piece `number` of each sender's share of this axis."""
            if axis == WHOLE:
                return x[None]
            senders = batch_shards(self._receivers)
            shares = x.reshape(
                *x.shape[:axis], senders, count, x.shape[axis] // (senders * count), *x.shape[axis + 1 :]
            )
            return jax.lax.index_in_dim(shares, number, axis + 1, keepdims=False).reshape(
                1, *x.shape[:axis], x.shape[axis] // count, *x.shape[axis + 1 :]
            )

        def make(*args: Any) -> list[PyTree]:
            made = self._make(*args)
            return [jax.tree.map(partial(part, number=number), made, self._split) for number in range(count)]

        with jax.set_mesh(self._source):
            self._split = jax.tree.map(self._split_axis, jax.eval_shape(self._make, *args), self._layout)
            shapes, *_ = jax.eval_shape(make, *args)
        specs = jax.tree.map(self._part_spec, self._split, self._layout)
        sender, *_ = self._senders.devices
        self._moves = [Move(_mesh(sender), _mesh(each), shapes, specs) for each in self._receivers.devices]
        return jax.jit(make, out_shardings=[shardings(self._senders, specs)] * count)

    def _split_axis(self, x: jax.ShapeDtypeStruct, sharding: NamedSharding) -> int:
        """Return the first axis that is not divided and that the target's devices along its batch divide, or WHOLE."""
        taken = [*sharding.spec, *[None] * (x.ndim - len(sharding.spec))]
        shards = batch_shards(self._target)
        free = (i for i, axis in enumerate(taken) if axis is None and x.shape[i] % shards == 0)
        return next(free, WHOLE) if shards > 1 else WHOLE

    @staticmethod
    def _part_spec(axis: int, sharding: NamedSharding) -> P:
        """Return the partition of a part [1, ..] over one group."""
        axes = [None, *sharding.spec]
        if axis != WHOLE:
            axes += [None] * (axis + 2 - len(axes))
            axes[axis + 1] = BATCH_AXES
        return P(*axes)


def check_sizes(source: Mesh, target: Mesh) -> None:
    """Raise ValueError unless one size divides the other, and the quotient the data x fsdp of a larger target."""
    name, size = f"asynchronous.rollout_mesh = {target.devices.shape}", target.size
    large, small = max(source.size, size), min(source.size, size)
    if large % small:
        nearest = nearest_divisors(size, large) if size < large else nearest_multiples(size, source.size)
        raise ValueError(
            f"{name}: has {size} devices; must be a multiple or a divisor of {source.size}, that of mesh = "
            f"{source.devices.shape}; nearest: {nearest}"
        )
    copies, shards = size // small, batch_shards(target)
    if shards % copies:
        raise ValueError(
            f"{name}: has {copies} times the devices of mesh; data x fsdp must be a multiple of {copies}; nearest: "
            f"{nearest_multiples(shards, copies)}"
        )


def _mesh(devices: np.ndarray) -> Mesh:
    """Return a mesh of equal groups of devices, or of one group."""
    names = (GROUPS, *AXES)[-devices.ndim :]
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * devices.ndim)

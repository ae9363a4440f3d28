"""Arrays sent from one mesh to another, while both go on computing."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from specjax import kernels
from specjax.drafters import Drafter
from specjax.parallel.mesh import AXES, BATCH_AXES, batch_shards
from specjax.parallel.move import Move, joined
from specjax.rollout.generate import gathered_shardings, prepare
from specjax.types import Params, Policy, PyTree

GROUPS = "groups"


class Send:
    """Callable that computes arrays on one mesh and returns them on another. Nothing waits for the arrays.

    1. A program on the source mesh computes them, each in as many different parts as the smaller mesh has devices.
    2. Each part moves from one device to one device, or to one in each group of a larger target mesh.
    3. A program on the target mesh gathers the parts over `data` and `fsdp`.

    An array without an axis that divides is copied whole. If the source mesh is larger, only the first of its equal
    groups sends.

    Args:
        make:   function that returns the arrays. Called with arrays on the source mesh, within a program.
        layout: sharding of each array on the target mesh, over no axis but the model axes.
        source: mesh on which the arrays are computed.
        target: mesh with other devices. Raises ValueError unless `check_sizes` allows both.
    """

    def __init__(self, make: Callable[..., PyTree], layout: PyTree, source: Mesh, target: Mesh) -> None:
        check_sizes(source, target)
        _, _, *model = target.devices.shape
        group = (min(source.size, target.size) // math.prod(model), 1, *model)
        self._source, self._target = source, target
        self._senders, self._receivers = (_mesh(mesh.devices.reshape(-1, *group)) for mesh in (source, target))
        self._make, self._layout = make, layout
        self._gather = jax.jit(partial(jax.tree.map, lambda x: x[0]), out_shardings=layout)
        self._scatter: Callable[..., PyTree] | None = None
        self._moves: list[Move] = []

    def __call__(self, *args: Any) -> PyTree:
        """Return the arrays that `make` returns for these arguments, on the target mesh."""
        if self._scatter is None:
            self._scatter, self._moves = self._parts(*args)
        with jax.set_mesh(self._source):
            parts = kernels.finished(self._scatter(*args), self._source)
        moved = jax.tree.map(partial(joined, self._receivers), *(move(parts) for move in self._moves))
        with jax.set_mesh(self._target):
            return kernels.finished(self._gather(moved), self._target)

    def _parts(self, *args: Any) -> tuple[Callable[..., PyTree], list[Move]]:
        """Return the first two parts for arguments like these. The arrays between the parts have a first axis of 1."""

        def make(*args: Any) -> PyTree:
            return jax.tree.map(lambda x: x[None], self._make(*args))

        with jax.set_mesh(self._source):
            shapes = jax.eval_shape(make, *args)
        specs = jax.tree.map(self._scattered_spec, shapes, self._layout)
        layout = jax.tree.map(lambda spec: NamedSharding(self._senders, spec), specs, is_leaf=_is_spec)
        sender, *_ = self._senders.devices
        moves = [Move(_mesh(sender), _mesh(each), shapes, specs) for each in self._receivers.devices]
        return jax.jit(make, out_shardings=layout), moves

    def _scattered_spec(self, x: jax.ShapeDtypeStruct, sharding: NamedSharding) -> P:
        """Return the partition with the first free axis that divides split over a group's `data` and `fsdp`."""
        axes = [None, *sharding.spec, *[None] * (x.ndim - 1 - len(sharding.spec))]
        shards = batch_shards(self._receivers)
        free = (i for i, axis in enumerate(axes) if i and axis is None and x.shape[i] % shards == 0)
        if shards > 1 and (first := next(free, None)) is not None:
            axes[first] = BATCH_AXES
        return P(*axes)


def check_sizes(source: Mesh, target: Mesh) -> None:
    """Raise ValueError unless the larger mesh is made of groups as large as the other: the target's along its batch."""
    name = f"asynchronous.rollout_mesh = {target.devices.shape}"
    large, small = max(source.size, target.size), min(source.size, target.size)
    if large % small:
        raise ValueError(
            f"{name}: has {target.size} devices; must be a multiple or a divisor of {source.size}, "
            f"that of mesh = {source.devices.shape}"
        )
    copies, shards = target.size // small, batch_shards(target)
    if shards % copies:
        raise ValueError(f"{name}: has {copies} times the devices of mesh; data x fsdp must be a multiple of that")


def copy_on(mesh: Mesh, policy: Policy, drafter: Drafter, params: Params) -> Params:
    """Return the rollout's copy of the parameters on another mesh, as ShapeDtypeStructs.

    Each is divided as on its own mesh, but over no axis of the other mesh that does not divide it.
    """

    def fit(x: jax.ShapeDtypeStruct, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        names = (axes if isinstance(axes, tuple) or axes is None else (axes,) for axes in sharding.spec)
        divided = (
            axes if axes and size % math.prod(mesh.shape[axis] for axis in axes) == 0 else None
            for axes, size in zip(names, x.shape, strict=False)
        )
        return x.update(sharding=NamedSharding(mesh, P(*divided)))

    shapes = jax.eval_shape(partial(prepare, policy, drafter), params)
    return jax.tree.map(fit, shapes, gathered_shardings(policy, drafter, params))


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)


def _mesh(devices: np.ndarray) -> Mesh:
    """Return a mesh of equal groups of devices, or of one group."""
    names = (GROUPS, *AXES)[-devices.ndim :]
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * devices.ndim)

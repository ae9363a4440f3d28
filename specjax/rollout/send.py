"""Arrays sent from one mesh to another, while both go on computing."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from specjax import kernels
from specjax.drafters import Drafter
from specjax.parallel.mesh import AXES, BATCH_AXES, batch_shards
from specjax.parallel.move import Move
from specjax.rollout.generate import gathered_shardings, prepare
from specjax.types import Params, Policy, PyTree

COPIES = "copies"


class Send:
    """Callable that computes arrays on one mesh and returns them on another. Nothing waits for the arrays.

    1. A program on the source mesh computes them, each in as many different parts as the target mesh has devices.
    2. Each part moves from one device to one device.
    3. A program on the target mesh gathers the parts over `data` and `fsdp`.

    An array without an axis that divides is copied whole. The source mesh has n times as many devices as the target
    mesh: only the first of n equal groups of them sends.

    Args:
        make:   function that returns the arrays. Called with arrays on the source mesh, within a program.
        layout: sharding of each array on the target mesh, over no axis but the model axes.
        source: mesh on which the arrays are computed.
        target: mesh with other devices. Raises ValueError if their number does not divide the source's.
    """

    def __init__(self, make: Callable[..., PyTree], layout: PyTree, source: Mesh, target: Mesh) -> None:
        if source.size % target.size:
            raise ValueError(f"target = {target.devices.shape}: its {target.size} devices must divide {source.size}")
        self._source, self._target = source, target
        groups = source.devices.reshape(-1, *target.devices.shape)
        types = (AxisType.Auto,) * groups.ndim
        self._groups = Mesh(groups, (COPIES, *AXES), axis_types=types)
        self._senders = Mesh(groups[0], AXES, axis_types=types[1:])
        self._make, self._layout = make, layout
        self._gather = jax.jit(partial(jax.tree.map, lambda x: x[0]), out_shardings=layout)
        self._scatter: Callable[..., PyTree] | None = None
        self._move: Move | None = None

    def __call__(self, *args: Any) -> PyTree:
        """Return the arrays that `make` returns for these arguments, on the target mesh."""
        if self._scatter is None or self._move is None:
            self._scatter, self._move = self._parts(*args)
        with jax.set_mesh(self._source):
            parts = kernels.finished(self._scatter(*args), self._source)
        moved = self._move(parts)
        with jax.set_mesh(self._target):
            return kernels.finished(self._gather(moved), self._target)

    def _parts(self, *args: Any) -> tuple[Callable[..., PyTree], Move]:
        """Return the first two parts for arguments like these. The arrays between the parts have a first axis of 1."""

        def make(*args: Any) -> PyTree:
            return jax.tree.map(lambda x: x[None], self._make(*args))

        with jax.set_mesh(self._source):
            shapes = jax.eval_shape(make, *args)
        specs = jax.tree.map(self._scattered_spec, shapes, self._layout)
        layout = jax.tree.map(lambda spec: NamedSharding(self._groups, spec), specs, is_leaf=_is_spec)
        return jax.jit(make, out_shardings=layout), Move(self._senders, self._target, shapes, specs)

    def _scattered_spec(self, x: jax.ShapeDtypeStruct, sharding: NamedSharding) -> P:
        """Return the partition with the first free axis that divides split over the target's `data` and `fsdp`."""
        axes = [None, *sharding.spec, *[None] * (x.ndim - 1 - len(sharding.spec))]
        shards = batch_shards(self._target)
        free = (i for i, axis in enumerate(axes) if i and axis is None and x.shape[i] % shards == 0)
        if shards > 1 and (first := next(free, None)) is not None:
            axes[first] = BATCH_AXES
        return P(*axes)


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

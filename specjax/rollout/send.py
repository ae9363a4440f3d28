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
from specjax.parallel import processes
from specjax.parallel.mesh import AXES, BATCH_AXES, batch_shards
from specjax.rollout.generate import gathered_shardings, prepare
from specjax.types import Params, Policy, PyTree

COPIES = "copies"


class Send:
    """Callable that computes arrays on one mesh and returns them on another. Nothing waits for the arrays.

    1. A program on the source mesh computes them, each in as many different parts as the target mesh has devices.
    2. Each part is copied from one device to one device.
    3. A program on the target mesh gathers the parts over `data` and `fsdp`.

    An array without an axis that divides is copied whole. The source mesh has n times as many devices as the target
    mesh: only the first of n equal groups of them copies.

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
        self._senders = list(groups[0].flat)
        axes = COPIES, *AXES
        self._groups = Mesh(groups, axes, axis_types=(AxisType.Auto,) * len(axes))
        self._make, self._layout = make, layout
        self._gather = jax.jit(lambda arrays: arrays, out_shardings=layout)
        self._scattered: PyTree = None
        self._scatter: Callable[..., PyTree] = make

    def __call__(self, *args: Any) -> PyTree:
        """Return the arrays that `make` returns for these arguments, on the target mesh."""
        if self._scattered is None:
            with jax.set_mesh(self._source):
                shapes = jax.eval_shape(self._make, *args)
            self._scattered = jax.tree.map(self._scattered_spec, shapes, self._layout)
            layout = jax.tree.map(lambda spec: NamedSharding(self._groups, spec), self._scattered, is_leaf=_is_spec)
            self._scatter = jax.jit(self._make, out_shardings=layout)
        with jax.set_mesh(self._source):
            parts = kernels.finished(self._scatter(*args), self._source)
        moved = jax.tree.map(
            lambda x, spec: processes.move(x, self._senders, self._target, spec), parts, self._scattered
        )
        with jax.set_mesh(self._target):
            return kernels.finished(self._gather(moved), self._target)

    def _scattered_spec(self, x: jax.ShapeDtypeStruct, sharding: NamedSharding) -> P:
        """Return the partition with the first free axis that divides split over the target's `data` and `fsdp`."""
        axes = [*sharding.spec, *[None] * (x.ndim - len(sharding.spec))]
        shards = batch_shards(self._target)
        free = (i for i, axis in enumerate(axes) if axis is None and x.shape[i] % shards == 0)
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

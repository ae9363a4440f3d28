"""Parameters of a network on a mesh: shapes, shardings and initialization.

All three derive from the boxed `init`, a function of a key such as `functools.partial(init_decoder, config)`. It is the
only place that defines shapes, dtypes and logical axis names.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Key

from models.config import Dtype
from specjax import kernels
from specjax.parallel import processes
from specjax.parallel.memory import bytes_per_device, check_memory, growing
from specjax.parallel.mesh import RULES, shardings
from specjax.types import PyTree

Init = Callable[[Key[Array, ""]], PyTree]


def abstract_params(init: Init, mesh: Mesh | None = None) -> PyTree:
    """Return the parameters as ShapeDtypeStructs, with shardings if a mesh is given. Allocates nothing.

    The devices of the mesh may be absent, or have too little memory. Raises ValueError if the mesh does not divide one.
    """
    boxed = jax.eval_shape(init, jax.random.key(0))
    shapes = nn.unbox(boxed)
    if mesh is None:
        return shapes
    on_mesh = shardings(shapes, nn.get_partition_spec(boxed), mesh)
    return jax.tree.map(lambda x, sharding: x.update(sharding=sharding), shapes, on_mesh)


def fitting_params(init: Init, mesh: Mesh) -> PyTree:
    """Return `abstract_params` for parameters that are about to be allocated.

    Raises ValueError if the devices of the mesh cannot hold them.
    """
    params, sizes = abstract_params(init, mesh), _sizes(jax.eval_shape(init, jax.random.key(0)))
    check_memory([growing("parameters", bytes_per_device(params), sizes, "mesh.fsdp more")], mesh)
    return params


def _sizes(boxed: PyTree) -> dict[str, int]:
    """Return the options that the parameters grow with, and their values."""
    leaves = jax.tree.leaves(boxed, is_leaf=lambda x: isinstance(x, nn.Partitioned))
    partitioned = [leaf for leaf in leaves if isinstance(leaf, nn.Partitioned)]
    axis_sizes = [pair for leaf in partitioned for pair in zip(leaf.names, leaf.value.shape, strict=True)]
    # The number of features follows from the other sizes.
    growing_with = {axis for axis, rule in RULES.items() if rule.mesh_axes} - {"features"}
    return {RULES[axis].option: size for axis, size in axis_sizes if axis in growing_with} or {"parameters": 1}


def param_shardings(init: Init, mesh: Mesh) -> PyTree:
    """Return the NamedSharding of each parameter, from its logical axis names."""
    return jax.tree.map(lambda x: x.sharding, abstract_params(init, mesh))


def init_params(init: Init, key: Key[Array, ""], mesh: Mesh) -> PyTree:
    """Return random parameters, each shard made on its own device. The values are the same on every mesh."""
    layout = jax.tree.map(lambda x: x.sharding, fitting_params(init, mesh))
    with kernels.quick_draws(mesh):
        return jax.jit(lambda key: nn.unbox(init(key)), out_shardings=layout)(key)


def replicate(params: PyTree, mesh: Mesh) -> PyTree:
    """Return the parameters on the mesh. Those without a NamedSharding are replicated on every device."""

    def put(x: Any) -> Array:
        on_mesh = isinstance(getattr(x, "sharding", None), NamedSharding)
        return x if on_mesh else processes.place(x, NamedSharding(mesh, P()))

    return jax.tree.map(put, params)


def by_path(params: PyTree) -> dict[tuple[str, ...], Any]:
    """Return the leaves of a nested dict by their keys. `flax.traverse_util.unflatten_dict` is the inverse."""
    return {tuple(key.key for key in path): leaf for path, leaf in jax.tree.leaves_with_path(params)}


def cast(params: PyTree, dtype: Dtype | None) -> PyTree:
    """Cast the parameters to a dtype; None keeps each one's."""
    return params if dtype is None else jax.tree.map(lambda x: x.astype(dtype), params)

"""The device mesh, and the rules by which its axes split the logical axes of arrays.

The mesh has four axes. `data` and `fsdp` split the batch; `fsdp` also splits the parameters and the optimiser state.
`expert` splits the experts of a mixture. `tensor` splits attention heads, the MLP and the vocabulary. Axes are Auto:
the compiler propagates shardings, and `constrain` pins them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from specjax.options import Options, Positive, nearest_divisors
from specjax.parallel import processes
from specjax.parallel.connections import connect
from specjax.types import PyTree

# Devices along the last axes are neighbours: `tensor` communicates most.
AXES = ("data", "fsdp", "expert", "tensor")
BATCH_AXES, MODEL_AXES = AXES[:2], AXES[2:]


class Rule(NamedTuple):
    """Rule for the split of one logical axis of arrays over mesh axes.

    Attributes:
        mesh_axes: Mesh axes that split it.
        option:    Option that sets its size, for messages.
        replicate: Whether a dimension that the mesh axes do not divide is replicated. Otherwise it is refused.
    """

    mesh_axes: tuple[str, ...]
    option: str
    replicate: bool = False


RULES: dict[str | None, Rule] = {
    # A forward may have a single row, as in an init. Steps and rollouts refuse batches that do not divide.
    "batch": Rule(BATCH_AXES, "batch", replicate=True),
    "embed": Rule(("fsdp",), "hidden_size"),
    "vocab": Rule(("tensor",), "vocab_size"),
    "markov": Rule(("fsdp",), "markov_rank"),
    "heads": Rule(("tensor",), "num_heads"),
    # Models have few of them. Each device then has all of them, as in other systems.
    "kv_heads": Rule(("tensor",), "num_kv_heads", replicate=True),
    "mlp": Rule(("tensor",), "intermediate_size"),
    "experts": Rule(("expert",), "num_experts"),
    "expert_mlp": Rule(("tensor",), "experts.intermediate_size"),
    "features": Rule(("tensor",), "feature_size"),
    "norm": Rule((), "hidden_size"),
    None: Rule((), ""),
}


@dataclass(frozen=True)
class MeshConfig(Options):
    """Devices along each axis of the mesh; their product is the number of devices used.

    Attributes:
        data:   Splits the batch.
        fsdp:   Splits the batch, the parameters and the optimiser state.
        tensor: Splits attention heads, the MLP and the vocabulary.
        expert: Splits the experts of a mixture; the rest of the network is replicated over it.
    """

    data: Positive = 1
    fsdp: Positive = 1
    tensor: Positive = 1
    expert: Positive = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the devices along each of AXES."""
        return tuple(getattr(self, axis) for axis in AXES)


def describe_mesh(mesh: MeshConfig) -> str:
    """Return the axes that have several devices, as "fsdp 4, tensor 2"."""
    axes = [f"{axis} {size}" for axis, size in zip(AXES, mesh.shape, strict=True) if size > 1]
    return ", ".join(axes) or "one device"


def _needs(config: MeshConfig) -> str:
    """Return the devices that a mesh needs, with its axes that have several, for messages."""
    needed = math.prod(config.shape)
    return "needs 1 device" if needed == 1 else f"needs {needed} devices ({describe_mesh(config)})"


def make_mesh(config: MeshConfig, alone: bool = True) -> Mesh:
    """Return a mesh over the first devices, process by process: neighbours along the last axes share a process.

    alone: there is no mesh beside it, so that every process must have one of its devices.

    Raises ValueError if there are too few devices, if a process would have none, or if the model axes would divide
    some process's devices.
    """
    needed, present = math.prod(config.shape), jax.device_count()
    if needed > present:
        raise ValueError(f"mesh = {config.shape}: {_needs(config)}, {present} present")
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))[:needed]
    owners = [device.process_index for device in devices]
    if alone:
        check_members(f"mesh = {config.shape}", owners, processes.count())
    check_groups(config.shape, owners)
    return connect(jax.make_mesh(config.shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices))


def disjoint_mesh(config: MeshConfig, other: Mesh) -> Mesh:
    """Return a mesh over the first devices that `other` does not use.

    Raises ValueError if there are too few, if a process would have devices of neither, or if the model axes would
    divide some process's devices.
    """
    name, shape, needed = "asynchronous.rollout_mesh", config.shape, math.prod(config.shape)
    taken, devices = set(other.devices.flat), sorted(jax.devices(), key=lambda x: (x.process_index, x.id))
    free = [device for device in devices if device not in taken]
    if len(free) < needed:
        raise ValueError(f"{name} = {shape}: {_needs(config)}, the other mesh leaves {len(free)}")
    owners, others = ([device.process_index for device in each] for each in (free[:needed], other.devices.flat))
    check_members(f"mesh and {name} = {other.devices.shape} and {shape}", owners + others, processes.count())
    check_groups(shape, owners, name)
    return connect(jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=free[:needed]))


def check_members(name: str, owners: Sequence[int], count: int) -> None:
    """Raise ValueError unless each of `count` processes has one of these devices. owners: the process of each."""
    absent = sorted({*range(count)} - {*owners})
    if absent:
        raise ValueError(
            f"{name}: uses {len(owners)} devices, and process {absent[0]} would have none; must use devices of all "
            f"{count} processes"
        )


def check_groups(shape: tuple[int, ...], owners: Sequence[int], name: str = "mesh") -> None:
    """Raise ValueError unless groups along the model axes fit into processes, or fill them.

    owners: the process of each device, in the order of the mesh.
    """
    model = math.prod(shape[len(BATCH_AXES) :])
    for start in range(0, len(owners), model):
        group = owners[start : start + model]
        for process in sorted({*group}):
            if group.count(process) < min(model, owners.count(process)):
                raise ValueError(
                    f"{name}.{f' x {name}.'.join(MODEL_AXES)} = {model}: would join {group.count(process)} of the "
                    f"{owners.count(process)} devices of process {process} with others; each group must be within one "
                    "process, or have all devices of several"
                )


def batch_shards(mesh: Mesh) -> int:
    """Return the number of shards that the batch is split into."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def spec(logical: tuple[str | None, ...], shape: tuple[int, ...], mesh: jax.sharding.AbstractMesh | Mesh) -> P:
    """Return the partition of an array with these logical axes.

    Raises ValueError for a dimension that its mesh axes do not divide, unless its rule is to replicate it.
    """
    manual = getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ())

    def axes(name: str | None, size: int) -> tuple[str, ...] | None:
        rule = RULES[name]
        names = tuple(axis for axis in rule.mesh_axes if axis not in manual)
        parts = math.prod(mesh.shape[axis] for axis in names)
        if size % parts == 0:
            return names or None
        if rule.replicate:
            return None
        raise ValueError(
            f"{rule.option} = {size}: must be a multiple of mesh.{' x mesh.'.join(names)} = {parts}; nearest "
            f"mesh.{' x mesh.'.join(names)}: {nearest_divisors(parts, size)}"
        )

    return P(*map(axes, logical, shape))


def constrain(x: Array, *logical: str | None) -> Array:
    """Pin the sharding of `x` on the ambient mesh by its logical axes; return `x` unchanged if there is no mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, spec(logical, x.shape, mesh))


def gather_weights(x: Array, *logical: str | None) -> Array:
    """Return a parameter as its readers need it: whole over `fsdp`, otherwise split by its logical axes.

    Give it in the dtype in which it is read. Left to itself, XLA (jax 0.10.2, for GPUs) gathers some parameters before
    the cast, and moves those of attention from `fsdp` to `expert` before it gathers them.
    """
    x = constrain(x, *logical)
    return constrain(x, *(None if RULES[name].mesh_axes == ("fsdp",) else name for name in logical))


def shapes_on(sharding: jax.sharding.Sharding, tree: PyTree) -> PyTree:
    """Return the arrays of a tree, or their shapes, as ShapeDtypeStructs with this sharding."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def shardings(abstract: PyTree, logical: PyTree, mesh: Mesh) -> PyTree:
    """Return NamedShardings for a tree of arrays (or their shapes) from the matching tree of logical axis names."""
    return jax.tree.map(lambda x, axes: NamedSharding(mesh, spec(tuple(axes), x.shape, mesh)), abstract, logical)

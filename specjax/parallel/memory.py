"""The memory of a device, and the refusal of what it cannot hold, before anything is allocated."""

import math
import os
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from specjax.parallel import processes
from specjax.types import PyTree

_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
_RESIDENT = Path("/proc/self/statm")
# Unit of `ru_maxrss`, in bytes.
_PEAK_UNIT = 1 if sys.platform == "darwin" else 1024


class MemoryPart(NamedTuple):
    """One part of what a program holds in memory at once.

    Attributes:
        name:   Name of the part, for the message.
        size:   Bytes per device.
        option: Option that makes it smaller.
        value:  Value of the option.
        remedy: What the option must be.
    """

    name: str
    size: int
    option: str
    value: int
    remedy: str


def growing(name: str, size: int, options: Mapping[str, int], other: str = "") -> MemoryPart:
    """Return a part that grows with several options. The message names the largest, and `other` ways to reduce it."""
    option = max(options, key=lambda name: options[name])
    return MemoryPart(name, size, option, options[option], f"must be less{other and f', or {other}'}")


def check_memory(parts: Sequence[MemoryPart], mesh: Mesh) -> None:
    """Raise ValueError if a device cannot hold all parts at once.

    The message names the largest part, and the option that makes it smaller.
    """
    needed, present = sum(part.size for part in parts), device_memory(mesh)
    if needed <= present:
        return
    largest = max(parts, key=lambda part: part.size)
    raise ValueError(
        f"{largest.option} = {largest.value}: needs at least {gib(needed)} GiB per device, which has {gib(present)} "
        f"GiB; {gib(largest.size)} GiB for {largest.name}; {largest.remedy}"
    )


def device_memory(mesh: Mesh) -> int:
    """Return the bytes of a device of the mesh; CPU devices share the machine's or the container's memory.

    The device is one of the first process that has any. Every process calls this.
    """

    def present() -> int:
        device = mesh.local_devices[0]
        if device.platform != "cpu":
            return (device.memory_stats() or {}).get("bytes_limit", 2**63)
        return host_memory() // len(mesh.local_devices)

    source = processes.owners(mesh)[0]
    return processes.agree(present() if processes.index() == source else 0, source)


def peak_gib(mesh: Mesh) -> float | None:
    """Return the most memory that was in use on a device of this process, in GiB; None where it is not counted."""
    stats = [device.memory_stats() or {} for device in mesh.local_devices]
    peaks = [each["peak_bytes_in_use"] for each in stats if "peak_bytes_in_use" in each]
    return max(peaks) / 2**30 if peaks else None


def host_peak_gib() -> float:
    """Return the most memory that this process has held so far, in GiB. On CPUs the arrays are in it."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _PEAK_UNIT / 2**30
    # The system counts the peak late.
    return max(peak, host_gib() or 0.0)


def host_gib() -> float | None:
    """Return the memory that this process holds now, in GiB; None where the system does not tell, as macOS."""
    if not _RESIDENT.is_file():
        return None
    return int(_RESIDENT.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30


def host_memory() -> int:
    """Return the bytes of the machine's memory, or of the container's."""
    present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _CONTAINER_LIMIT.read_text().strip() if _CONTAINER_LIMIT.is_file() else "max"
    return min(present, int(limit)) if limit.isdigit() else present


def bytes_per_device(tree: PyTree) -> int:
    """Return the bytes that each device holds of arrays or of ShapeDtypeStructs; without a sharding, all of them."""
    return sum(math.prod(shard_shape(x)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def shard_shape(x: jax.Array | jax.ShapeDtypeStruct) -> tuple[int, ...]:
    """Return the shape of what each device holds of an array; without a sharding, of all of it."""
    return x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)


def gib(size: int | float) -> str:
    """Return a size as text, in GiB."""
    return f"{size / 2**30:,.1f}"

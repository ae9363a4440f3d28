"""The processes of a job: values that pass between them through the host, and between host and devices.

Arrays pass between the devices of two meshes by `specjax.asynchronous.device_transfer`.

JAX runs one program in every process (multi-controller). Every process calls the functions below in the same order
with the same arguments, unless their docstring says otherwise. With one process they cost no more than jax's own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from threading import Thread
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax._src import distributed  # the key-value store has no public name; Orbax imports it from here too
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from specjax.parallel.messages import decode, encode
from specjax.parallel.streams import offer, receive
from specjax.types import PyTree

T = TypeVar("T")

# A year: launch.jobs.silence ends a job in which all wait.
_WAIT_MS = 365 * 24 * 60 * 60 * 1000
# A value in the store is a message, or the address of one that is larger.
_HERE, _OFFERED, _LARGE_BYTES = b"m", b"a", 2**16
# Processes are never this many agreements apart: steps hold collectives.
_KEPT_AGREEMENTS = 1000


@dataclass
class _Group:
    """Processes that work together: all, or those within `within`.

    members:    their numbers in the job; None: all.
    keys:       start of the keys of their values.
    agreements: keys so far.
    passing:    sends the last value that this process has passed on; ends when all others have it.
    """

    members: list[int] | None
    keys: str
    agreements: int = 0
    passing: Thread | None = None


_group = _Group(None, "specjax")


def count() -> int:
    """Return the number of processes. Unlike `jax.process_count`, it does not start a backend."""
    return distributed.global_state.num_processes if _group.members is None else len(_group.members)


def index() -> int:
    """Return the number of this process, from 0. Does not start a backend."""
    return _number(distributed.global_state.process_id)


def in_subgroup() -> bool:
    """Return True within `within` or `on_primary`, if other processes wait outside."""
    return _group.members is not None


def primary() -> bool:
    """Return True in process 0, which alone writes files and prints."""
    return index() == 0


def fetch(tree: PyTree) -> PyTree:
    """Return the tree with every array as a numpy array, whole in every process.

    Arrays that span processes are gathered by a program; all others are copied, as by `jax.device_get`. Arrays of a
    mesh that some processes have no device of are passed on by the first that has one, and wait for no other mesh.
    """
    if count() == 1:
        return jax.device_get(tree)
    leaves, structure = jax.tree.flatten(tree)
    parts: dict[int, dict[int, Any]] = {}
    for number, x in enumerate(leaves):
        if _spans_processes(x):
            leaves[number] = x = _gathered(x)
        if (source := _source(x)) is not None:
            parts.setdefault(source, {})[number] = x
    for source, found in parts.items():
        passed = _pass(source, jax.device_get(found) if index() == source else {})
        for number, x in passed.items():
            leaves[number] = x
    return jax.device_get(jax.tree.unflatten(structure, leaves))


def fetch_here(tree: PyTree) -> PyTree:
    """Return the tree with every array as a numpy array. Any process that has all of their parts may call it alone."""
    return jax.device_get(tree)


def owners(mesh: Mesh) -> list[int]:
    """Return the processes that have a device of a mesh, ascending."""
    return sorted({_number(device.process_index) for device in mesh.devices.flat})


def place(tree: PyTree, sharding: Sharding) -> PyTree:
    """Put arrays on devices with this sharding. Each process sends its own shards.

    Host arrays must be whole, and the same, in every process.
    """
    if count() == 1:
        return jax.device_put(tree, sharding)
    return jax.tree.map(lambda x: _place(x, sharding), tree)


def placeholder(abstract: PyTree) -> PyTree:
    """Return arrays with the shapes, dtypes and shardings of `abstract`, for a process that has no device of them."""

    def make(x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        assert x.sharding is not None
        return jax.make_array_from_single_device_arrays(x.shape, x.sharding, [], dtype=x.dtype)

    return jax.tree.map(make, abstract)


def own_rows(x: jax.Array | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (row numbers, rows) of the rows [R, ..] that this process owns.

    Each row has one owner, even if several processes hold copies. With one process, it owns all rows. Each of several
    owns a part of the rows of a numpy array, which must be the same in all.
    """
    if isinstance(x, np.ndarray):
        rows = np.array_split(np.arange(len(x)), count())[index()]
        return rows, x[rows]
    if x.is_fully_addressable:
        return np.arange(len(x)), fetch_here(x)
    shards = [shard for shard in x.addressable_shards if shard.replica_id == 0]
    parts = {range(*shard.index[0].indices(len(x))): shard.data for shard in shards}
    slices = sorted(parts, key=lambda rows: rows.start)
    rows = np.array([row for each in slices for row in each], np.int64)
    return rows, np.concatenate([np.zeros((0, *x.shape[1:]), x.dtype), *(fetch_here(parts[each]) for each in slices)])


def join_rows(rows: np.ndarray, values: Sequence[np.ndarray], total: int) -> tuple[np.ndarray, ...]:
    """Return arrays of all `total` rows, in every process. Each process gives the values of its `own_rows`.

    Waits for every process, without a device.
    """
    if count() == 1:
        return tuple(values)
    whole = tuple(np.zeros((total, *value.shape[1:]), value.dtype) for value in values)
    for theirs, parts in gather((rows, tuple(values))):
        for x, part in zip(whole, parts, strict=True):
            x[theirs] = part
    return whole


def agree(value: T, source: int = 0) -> T:
    """Return the value of one process, the primary, in every process. `specjax.parallel.messages` says what it may be.

    Involves no device, so that it does not wait for programs under way.
    """
    return value if count() == 1 else _agree(value, source)


def gather(value: T) -> list[T]:
    """Return the values of all processes, in every process. `specjax.parallel.messages` says what they may be.

    Waits for every process, without a device.
    """
    if count() == 1:
        return [value]
    key = _next_key()
    _store().key_value_set_bytes(f"{key}/{index()}", encode(value))
    return [decode(_wait(f"{key}/{i}")) for i in range(count())]


def on_primary(run: Callable[[], T]) -> T:
    """Call a function in the primary alone. Return its result, or raise its exception, in every process."""
    return _only_in([0], run)


def within(mesh: Mesh, run: Callable[[], T], elsewhere: T | None = None) -> T:
    """Call a function in the processes of a mesh, as if there were no others: the first of them is the primary there.

    The others wait for it. They get `elsewhere`, or if that is None the result of the first, or its exception.
    """
    return _only_in(owners(mesh), run, elsewhere)


def _only_in(members: list[int], run: Callable[[], T], elsewhere: T | None = None) -> T:
    global _group
    if len(members) == count():
        return run()
    key, whole, result, error = _next_key(), _group, None, None
    if index() in members:
        _group = _Group(members, key)
        try:
            result = run()
        except Exception as raised:
            error = raised
        finally:
            _group = whole
    others, failed = _agree((result if elsewhere is None else None, error), members[0])
    if (error := error or failed) is not None:
        raise error
    return cast(T, result if index() in members else others if elsewhere is None else elsewhere)


def tell(topic: str, value: str) -> None:
    """Leave a value that others may read by `read_messages`. Any process and any thread may call it, at any time."""
    state = distributed.global_state
    if state.num_processes > 1:
        _store().key_value_set(f"specjax/{topic}/{state.process_id}", value, allow_overwrite=True)


def read_messages(topic: str) -> list[str]:
    """Return the values that processes have left on a topic. Any process and any thread may call it, at any time."""
    return [value for _, value in _store().key_value_dir_get(f"specjax/{topic}")]


def _agree(value: T, source: int) -> T:
    key = _next_key()
    if index() != source:
        return decode(_wait(key))
    _store().key_value_set_bytes(key, encode(value))
    return value


def _spans_processes(x: Any) -> bool:
    return isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated)


def _gathered(x: jax.Array) -> Any:
    """Return an array that spans processes, whole in each process that has a part of it."""
    mesh = getattr(x.sharding, "mesh", None)
    if mesh is None or (len(owners(mesh)) == count() and not in_subgroup()):
        return multihost_utils.process_allgather(x, tiled=True)
    return _whole_on(mesh)(x)


@cache
def _whole_on(mesh: Mesh) -> Callable[[PyTree], PyTree]:
    return jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, P()))


def _source(x: Any) -> int | None:
    """Return the first process that has a device of an array's mesh; None if all have one, or if x is of no mesh.

    Arrays that are not committed to a device were made by each process for itself.
    """
    if not isinstance(x, jax.Array) or not x.committed:
        return None
    having = {_number(device.process_index) for device in x.sharding.device_set}
    return None if len(having) == count() else min(having)


def _pass(source: int, value: T) -> T:
    """Return the value of process `source`, which may be large, in every process.

    The source keeps no more than one large value: before the next it waits until all others have read it.
    """
    key = _next_key()
    if index() != source:
        stored = _wait(key)
        kind, message = stored[:1], stored[1:]
        return decode(receive(message.decode(), index()) if kind == _OFFERED else message)
    if _group.passing is not None:
        _group.passing.join()
        _group.passing = None
    kind, message = _HERE, encode(value)
    if len(message) > _LARGE_BYTES:
        coordinator = distributed.global_state.coordinator_address
        assert coordinator is not None
        address, _group.passing = offer(message, count() - 1, coordinator)
        kind, message = _OFFERED, address.encode()
    _store().key_value_set_bytes(key, kind + message)
    return value


def _place(x: Any, sharding: Sharding) -> jax.Array:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return jax.device_put(x, sharding)
    # `jax.device_put` would compare the processes' values, by a program at every call.
    value = np.asarray(x)
    value = value.astype(jax.dtypes.canonicalize_dtype(value.dtype), copy=False)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index], dtype=value.dtype)


def _wait(key: str) -> bytes:
    return _store().blocking_key_value_get_bytes(key, _WAIT_MS)


def _store() -> Any:
    return distributed.global_state.client


def _next_key() -> str:
    _group.agreements += 1
    if primary() and _group.agreements > _KEPT_AGREEMENTS:
        # With all keys below it.
        _store().key_value_delete(f"{_group.keys}/{_group.agreements - _KEPT_AGREEMENTS}")
    return f"{_group.keys}/{_group.agreements}"


def _number(process: int) -> int:
    """Return the number of a process of the job among those that work together."""
    return process if _group.members is None else _group.members.index(process)

"""The readers of compiled programs find collectives, copies and loops."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from specjax import cache as kv
from specjax import kernels
from specjax.testing.hlo import Program, collectives, groups, within_shard
from specjax.types import LayerCache
from tests.specjax.training import mesh_of

ROWS, LENGTH, HEADS, DIM, WIDTH = 16, 37, 2, 8, 3
AXES = P(("data", "fsdp"))
Body = Callable[[LayerCache, jax.Array], tuple[LayerCache, jax.Array]]


def attend(cache: LayerCache, start: jax.Array) -> jax.Array:
    """Attend as in a round: one query per new position, over the whole cache."""
    query = jnp.ones((len(start), WIDTH, HEADS, DIM))
    return kernels.attend(query, cache, jnp.ones((len(start), WIDTH, LENGTH), bool))


def clean(cache: LayerCache, start: jax.Array) -> tuple[LayerCache, jax.Array]:
    new = jnp.ones((len(start), WIDTH, HEADS, DIM))
    cache = kv.write(cache, new, new, start)
    return cache, start + 1 + (attend(cache, start).sum(axis=(1, 2, 3)) > 1e6).astype(jnp.int32)


def sum_over(axis: str) -> Body:
    def body(cache: LayerCache, start: jax.Array) -> tuple[LayerCache, jax.Array]:
        cache, start = clean(cache, start)
        return cache, start + (jax.lax.psum(start.sum(), axis) < 0).astype(jnp.int32)

    return body


def keep_finished_rows(cache: LayerCache, start: jax.Array) -> tuple[LayerCache, jax.Array]:
    written, after = clean(cache, start)
    done = (start > 10)[:, None, None, None]
    return LayerCache(*(jnp.where(done, old, new) for old, new in zip(cache, written, strict=True))), after


def choose_a_cache(cache: LayerCache, start: jax.Array) -> tuple[LayerCache, jax.Array]:
    written, after = clean(cache, start)
    return jax.lax.cond(start[0] > 10, lambda: cache, lambda: written), after


def swap_keys_and_values(cache: LayerCache, start: jax.Array) -> tuple[LayerCache, jax.Array]:
    written, after = clean(cache, start)
    return LayerCache(written.v, written.k), after


def compiled_loop(shape: tuple[int, int, int], body: Body, manual: set[str]) -> tuple[Program, list, int]:
    """Compile `body` in a loop over a cache with sharded slots, inside a shard_map over the axes `manual`, if any."""
    mesh = mesh_of(*shape)

    def run(cache: LayerCache, start: jax.Array) -> tuple[LayerCache, jax.Array]:
        return jax.lax.while_loop(lambda carry: jnp.any(carry[1] < 20), lambda carry: body(*carry), (cache, start))

    if manual:
        run = jax.shard_map(
            run, mesh=mesh, in_specs=(AXES, AXES), out_specs=(AXES, AXES), axis_names=manual, check_vma=False
        )
    slots = NamedSharding(mesh, AXES)
    start = jax.ShapeDtypeStruct((ROWS,), jnp.int32, sharding=slots)
    keys = jax.ShapeDtypeStruct((ROWS, HEADS, LENGTH, DIM), jnp.float32, sharding=slots)
    text = jax.jit(run, out_shardings=slots).lower(LayerCache(keys, keys), start).compile().as_text()
    local = (ROWS // (mesh.shape["data"] * mesh.shape["fsdp"]), HEADS, LENGTH, DIM)
    program = Program(text)
    return program, program.loop(local, 2), int(np.prod(local))


EVERY = {"data", "fsdp", "tensor"}


def test_a_clean_loop_passes_both_checks() -> None:
    program, loop, keys = compiled_loop((8, 1, 1), clean, EVERY)
    assert any(line.opcode == "dot" for line in loop)
    assert not collectives(loop) and not program.copies(loop, keys)


def test_collectives_are_found_with_their_axes() -> None:
    assert collectives(compiled_loop((8, 1, 1), sum_over("data"), EVERY)[1])
    for axis in ("data", "tensor"):
        found = collectives(compiled_loop((2, 2, 2), sum_over(axis), EVERY)[1])
        assert found and {within_shard(line.line, mesh_of(2, 2, 2)) for line in found} == {axis == "tensor"}


def test_a_scattered_write_to_sharded_slots_is_found() -> None:
    def scattered(cache: LayerCache, start: jax.Array) -> tuple[LayerCache, jax.Array]:
        rows, columns = jnp.arange(ROWS)[:, None], start[:, None] + jnp.arange(WIDTH)[None]
        new = jnp.ones((ROWS, WIDTH, HEADS, DIM))
        return LayerCache(cache.k.at[rows, :, columns].set(new), cache.v.at[rows, :, columns].set(new)), start + 1

    _, loop, _ = compiled_loop((8, 1, 1), scattered, set())
    assert [line for line in collectives(loop) if not within_shard(line.line, mesh_of(8, 1, 1))]


def another_layout(cache: LayerCache, start: jax.Array) -> tuple[LayerCache, jax.Array]:
    cache, start = clean(cache, start)
    moved = jnp.moveaxis(cache.k, 2, 0)
    return cache, start + (jnp.einsum("sbkh,bh->s", moved, moved[0, :, 0])[0] < 0).astype(jnp.int32)


def test_a_loop_launches_what_its_body_names_but_not_what_its_fusions_hold() -> None:
    program, loop, _ = compiled_loop((8, 1, 1), clean, EVERY)
    launched = program.launched((ROWS // 8, HEADS, LENGTH, DIM), 2)
    assert {line.computation for line in launched} < {line.computation for line in loop}
    assert len({line.computation for line in launched}) == 1
    written = [line for line in launched if (ROWS // 8, HEADS, LENGTH, DIM) in line.arrays]
    assert len(written) == 2 and all("f32" in line.dtypes and "scatter" in line.line for line in written)
    assert any("while/body" in line.scope for line in launched)
    assert not any(line.opcode in ("parameter", "tuple", "get-tuple-element") for line in launched)


@pytest.mark.parametrize("body", [keep_finished_rows, choose_a_cache, swap_keys_and_values, another_layout])
def test_a_copy_of_the_cache_is_found(body) -> None:
    program, loop, keys = compiled_loop((8, 1, 1), body, EVERY)
    assert program.copies(loop, keys)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add", [(0, 1), (2, 3)]),
        ("all-gather(%x), replica_groups=[4,2]<=[8], dimensions={2}", [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ("all-reduce(%x), replica_groups=[2,4]<=[2,2,2]T(1,0,2)", [(0, 1, 4, 5), (2, 3, 6, 7)]),
        ("all-reduce(%x), replica_groups=[4,2]<=[2,4]T(1,0)", [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("all-gather(%x), replica_groups=mesh['a'=2,'b'=2] {'b'}, dimensions={0}", [(0, 1), (2, 3)]),
        ("all-gather(%x), replica_groups=mesh['a'=2,'b'=2] {'a'}, dimensions={0}", [(0, 2), (1, 3)]),
        ("all-gather(%x), replica_groups=mesh['a'=2,'b'=2] {'a','b'}, dimensions={0}", [(0, 1, 2, 3)]),
        (
            "all-reduce(%x), replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}, to_apply=%add",
            [(0, 2), (1, 3)],
        ),
        ("collective-permute(%x), source_target_pairs={{0,1},{1,0}}", [(0, 1), (1, 0)]),
        ("all-reduce(%x), replica_groups={}, to_apply=%add", None),
    ],
)
def test_groups_are_read_in_every_form(line: str, expected) -> None:
    assert groups(line) == expected


def test_an_unknown_form_raises() -> None:
    with pytest.raises(ValueError, match="no groups"):
        groups("all-reduce(%x), replica_groups=mesh['a'=4] {'a':(1)2}, to_apply=%add")


def test_a_group_of_all_devices_is_not_within_a_shard() -> None:
    mesh = mesh_of(2, 2, 2)
    assert not within_shard("all-reduce(%x), replica_groups={}, to_apply=%add", mesh)
    assert not within_shard("all-reduce(%x), replica_groups=[4,2]<=[2,4]T(1,0)", mesh)
    assert within_shard("all-reduce(%x), replica_groups=[4,2]<=[8]", mesh)

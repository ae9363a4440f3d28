"""Operations that launch.plan counts in a traced program, and collectives in a compiled one."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as private
from jax.sharding import PartitionSpec as P

from launch.plan.flops import flops
from launch.plan.traffic import collectives_of
from specjax import kernels
from specjax.kernels import cudnn
from specjax.parallel.mesh import MeshConfig, make_mesh
from specjax.testing.hlo import Program
from specjax.types import LayerCache


def test_operations_are_counted_through_loops_branches_and_shards():
    mesh, x, w = make_mesh(MeshConfig(data=2)), jnp.ones((4, 8)), jnp.ones((8, 8))
    product = 2 * 4 * 8 * 8

    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        x = jax.lax.scan(lambda x, _: (x @ w, None), x, length=3)[0]
        x = jax.lax.cond(x[0, 0] > 0, lambda x: x @ w @ w, lambda x: x @ w, x)
        x = jax.shard_map(lambda x: x @ w, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x)
        x = jax.lax.ragged_dot(x, jnp.stack([w, w]), jnp.array([1, 2]))
        x = kernels.gpu.run_if(x[0, 0] > 0, lambda x: x @ w, x)

        def inner(x: jax.Array) -> jax.Array:
            return jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: jnp.sin(x @ w), x)

        return jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: inner(x @ w @ w), x)

    assert flops(jax.make_jaxpr(run)(x, w).jaxpr) == (8 * product, product)


def test_attention_by_cudnn_counts_every_position_of_a_cache_and_half_of_a_causal_row(monkeypatch: pytest.MonkeyPatch):
    """8 query heads share 2 of keys. A gradient takes 5 products for 2, and tokens of a round see one another."""
    monkeypatch.setattr(private, "check_cudnn_version", lambda: 91_000)
    monkeypatch.setattr(private, "check_compute_capability", lambda capability: True)
    rows, tokens, positions, size = 2, 4, 2048, 64
    q, new = (jnp.ones((rows, tokens, heads, size), jnp.bfloat16) for heads in (8, 2))
    cache = LayerCache(*(jnp.ones((rows, 2, positions, size), jnp.bfloat16),) * 2)
    start = jnp.full(rows, 9)

    def count(function: Callable[..., jax.Array], *args: jax.Array) -> float:
        return flops(jax.make_jaxpr(function)(*args).jaxpr).fixed

    by_position = 2 * 2 * rows * 8 * size  # of a query token, with a key and with a value
    found = count(lambda q: cudnn.in_two_parts(cudnn.over_cache, q, cache, start), q)
    assert found == by_position * tokens * (positions + tokens)
    q, new = (jnp.ones((rows, 128, heads, size), jnp.bfloat16) for heads in (8, 2))
    forward = count(lambda q: cudnn.attend_rows(q, new, new), q)
    assert forward == by_position * 128 * 128 / 2
    both = count(jax.grad(lambda q: cudnn.attend_rows(q, new, new).sum().astype(jnp.float32)), q)
    assert both == 3.5 * forward


COMPILED = """
%condition (p: (f32[4,8])) -> pred[] {
  ROOT %any = pred[] all-reduce(%x), replica_groups={{0,2},{1,3},{4,6},{5,7}}, to_apply=%or
}
%body (p: (f32[4,8])) -> (f32[4,8]) {
  %sum = f32[4,8]{1,0} all-reduce(%x), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
}
%flag (p: (pred[], f32[4,8])) -> pred[] {
  %p = (pred[], f32[4,8]) parameter(0)
  ROOT %first = pred[] get-tuple-element(%p), index=0
}
%outer (p: (f32[4,8])) -> (f32[4,8]) {
  %once = (f32[4,8]) while(%t), condition=%flag, body=%body
  %round = (f32[4,8]) while(%t), condition=%condition, body=%body
}
%long (p: (f32[4,8])) -> (f32[4,8]) {
  %start = (bf16[4,8]{1,0}, bf16[4,16]{1,0}) all-gather-start(%x), replica_groups=[4,2]<=[8], dimensions={1}
  %done = bf16[4,16]{1,0} all-gather-done(%start)
}
%short (p: (f32[4,8])) -> (f32[4,8]) {
  %none = f32[4,8]{1,0} add(%x, %x)
}
ENTRY %main (p: f32[4,8]) -> f32[4,8] {
  %known = (f32[4,8]) while(%t), condition=%short, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %chosen = (f32[4,8]) conditional(%i, %t, %t), branch_computations={%short, %long}
  %unknown = (f32[4,8]) while(%t), condition=%short, body=%outer
}
"""


def test_collectives_are_counted_through_loops_and_branches():
    fixed, outer, turn = collectives_of(Program(COMPILED), make_mesh(MeshConfig(data=2, fsdp=2, tensor=2)))
    total, gather, check = ("all-reduce", ("tensor",)), ("all-gather", ("tensor",)), ("all-reduce", ("fsdp",))
    assert fixed.count == {total: 3, gather: 1} and fixed.size == {total: 3 * 128, gather: 128}
    assert outer.count == {total: 1}
    assert turn.count == {total: 1, check: 1} and turn.size == {total: 128, check: 1}

"""Operations that launch.plan counts in a traced program, and collectives in a compiled one."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from launch.plan.flops import flops
from launch.plan.traffic import collectives_of
from specjax import kernels
from specjax.parallel.mesh import MeshConfig, make_mesh
from specjax.testing.hlo import Program


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

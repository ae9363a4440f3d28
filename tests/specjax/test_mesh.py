import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from specjax.parallel.mesh import (
    BATCH_AXES,
    MeshConfig,
    batch_shards,
    constrain,
    disjoint_mesh,
    make_mesh,
    shardings,
    spec,
)
from tests.refusals import refuses
from tests.specjax.training import mesh_of


def test_a_mesh_takes_the_first_devices_in_order() -> None:
    mesh = make_mesh(MeshConfig(data=2, tensor=2))
    assert dict(mesh.shape) == {"data": 2, "fsdp": 1, "expert": 1, "tensor": 2}
    np.testing.assert_array_equal(mesh.device_ids.ravel(), [0, 1, 2, 3])
    assert tuple(make_mesh(MeshConfig(expert=4, tensor=2)).shape.values()) == (1, 1, 4, 2)
    assert batch_shards(mesh) == 2 and batch_shards(mesh_of(2, 2, 2)) == 4


def test_a_mesh_larger_than_the_machine_is_refused() -> None:
    with refuses("mesh = (4, 2, 1, 2): needs 16 devices (data 4, fsdp 2, tensor 2), 8 present"):
        make_mesh(MeshConfig(4, 2, 2))
    full = make_mesh(MeshConfig(8))
    for config, needed in (MeshConfig(), "1 device"), (MeshConfig(expert=2), "2 devices (expert 2)"):
        with refuses(f"asynchronous.rollout_mesh = {config.shape}: needs {needed}, the other mesh leaves 0"):
            disjoint_mesh(config, full)


@pytest.mark.parametrize(
    ("logical", "shape", "expected"),
    [
        (("batch", None), (8, 3), P(BATCH_AXES, None)),
        (("embed", "heads", None), (4, 6, 5), P(("fsdp",), ("tensor",), None)),
        (("embed", "vocab"), (4, 6), P(("fsdp",), ("tensor",))),
        (("norm",), (4,), P(None)),
        (("embed", "kv_heads", None), (4, 3, 5), P(("fsdp",), None, None)),
        (("batch", "mlp"), (6, 4), P(None, ("tensor",))),
    ],
)
def test_logical_axes_follow_the_rules(logical, shape, expected) -> None:
    assert spec(logical, shape, mesh_of(2, 2, 2)) == expected


@pytest.mark.parametrize(
    ("logical", "shape", "message"),
    [
        (("mlp", "embed"), (7, 4), "intermediate_size = 7: must be a multiple of mesh.tensor = 2"),
        (("embed", "heads", None), (4, 3, 5), "num_heads = 3: must be a multiple of mesh.tensor = 2"),
        (("vocab", "embed"), (5, 3), "vocab_size = 5: must be a multiple of mesh.tensor = 2"),
        (("vocab", "embed"), (6, 3), "hidden_size = 3: must be a multiple of mesh.fsdp = 2"),
    ],
)
def test_a_dimension_that_its_axes_do_not_divide_is_refused(logical, shape, message) -> None:
    with refuses(message):
        spec(logical, shape, mesh_of(2, 2, 2))


def test_trees_of_logical_axes_become_trees_of_shardings() -> None:
    mesh = mesh_of(1, 4, 2)
    shapes = {"kernel": jax.ShapeDtypeStruct((8, 4), jnp.float32), "scale": jax.ShapeDtypeStruct((8,), jnp.float32)}
    got = shardings(shapes, {"kernel": ("embed", "mlp"), "scale": ("norm",)}, mesh)
    assert got == {"kernel": NamedSharding(mesh, P(("fsdp",), ("tensor",))), "scale": NamedSharding(mesh, P(None))}


def test_constrain_pins_the_layout_on_the_ambient_mesh() -> None:
    mesh, x = mesh_of(2, 2, 2), jnp.arange(32.0).reshape(8, 4)
    with jax.set_mesh(mesh):
        pinned = jax.jit(lambda x: constrain(x, "batch", "heads"))(x)
    assert pinned.sharding.is_equivalent_to(NamedSharding(mesh, P(BATCH_AXES, "tensor")), 2)
    np.testing.assert_array_equal(pinned, x)


def test_constrain_leaves_manual_axes_alone_and_does_nothing_without_a_mesh() -> None:
    mesh, x = mesh_of(2, 2, 2), jnp.arange(32.0).reshape(8, 4)
    assert constrain(x, "batch", "heads") is x
    rows = P(BATCH_AXES)
    local = jax.shard_map(
        lambda x: constrain(x, "batch", "heads") + 1, mesh=mesh, in_specs=rows, out_specs=rows, axis_names={*BATCH_AXES}
    )
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(jax.jit(local)(x), x + 1)

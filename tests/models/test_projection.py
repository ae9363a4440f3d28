"""Dense layers: two rows in float32, and all in bfloat16, a CPU multiplies in its own way."""

from copy import copy
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.sharding import use_abstract_mesh

from models.config import DecoderConfig
from models.projection import Projection
from specjax.parallel.mesh import MeshConfig, decoding_options, make_mesh
from specjax.testing.hlo import Program, collectives
from tests.specjax.training import AS_SHIPPED

CONFIG = DecoderConfig(
    vocab_size=8, hidden_size=6, intermediate_size=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4
)


@pytest.mark.parametrize("batch", [(1, 2), (2, 1), (1, 3), (2, 2), (2,)])
@pytest.mark.parametrize(("inner", "contract", "features"), [((6,), 1, (2, 4)), ((2, 4), 2, 6)])
def test_a_projection_is_a_matmul_over_the_axes_it_contracts(batch, inner, contract, features) -> None:
    layer = Projection(CONFIG, features, ("embed", "heads", "head"), contract=contract)
    x = np.random.default_rng(0).normal(size=(*batch, *inner)).astype(np.float32)
    kernel = np.random.default_rng(1).normal(size=(*inner, *np.atleast_1d(features))).astype(np.float32)
    params = {"params": {"kernel": jnp.asarray(kernel)}}
    got = jax.jit(layer.apply)(params, x)
    np.testing.assert_allclose(got, np.tensordot(x, kernel, axes=len(inner)), atol=1e-5)


@pytest.mark.parametrize(
    ("platform", "batch", "products"),
    [
        ("cpu", (1, 1), [1]),
        ("cpu", (1, 2), [1, 1]),
        ("cpu", (2, 1), [1, 1]),
        ("cpu", (1, 3), [3]),
        ("cuda", (2, 1), [2]),
    ],
)
def test_a_cpu_multiplies_two_rows_one_by_one(platform, batch, products) -> None:
    layer, x = Projection(CONFIG, 5, ("embed", "mlp")), jnp.ones((*batch, 6))
    params = {"params": {"kernel": jnp.ones((6, 5))}}
    text = jax.jit(layer.apply).trace(params, x).lower(lowering_platforms=(platform,)).as_text()
    shapes = [line.split("-> tensor<")[1].split("x") for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert [int(np.prod([int(size) for size in shape[:-2]])) for shape in shapes] == products


@pytest.mark.parametrize(("batch", "contract", "features"), [((2, 3), 1, (4, 16)), ((1, 2), 1, 64), ((2, 2), 2, 64)])
def test_a_cpu_multiplies_bfloat16_and_its_gradients_in_bfloat16_and_makes_no_float32_of_the_kernel(
    batch, contract, features
) -> None:
    config = replace(CONFIG, dtype="bfloat16")
    layer, inner = Projection(config, features, ("embed", "heads", "head"), contract), (64, 32)[:contract]
    x = jax.random.normal(jax.random.key(1), (*batch, *inner), "bfloat16")
    kernel = jax.random.normal(jax.random.key(0), (*inner, *np.atleast_1d(features)), "bfloat16")
    params = {"params": {"kernel": kernel}}
    run = jax.jit(layer.apply, compiler_options=AS_SHIPPED | decoding_options(x.dtype)).lower(params, x).compile()
    wide = np.tensordot(np.float64(x), np.float64(kernel), axes=contract)
    y = run(params, x)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float64(y), wide, rtol=2**-8, atol=1e-4)
    program = Program(run.as_text())
    lines = [line for computation in program.computations.values() for line in computation]
    (product,) = (line for line in lines if line.opcode == "dot")
    assert product.line.split(" = ")[1].startswith("f32")
    assert "convert" not in {line.opcode for line in lines if line.elements == kernel.size}
    cotangent = jax.random.normal(jax.random.key(2), y.shape, "bfloat16")
    backward = jax.vjp(lambda x, kernel: layer.apply({"params": {"kernel": kernel}}, x), x, kernel)[1]
    (dx, dk), g = (np.float64(gradient) for gradient in backward(cotangent)), np.float64(cotangent)
    outs = tuple(range(g.ndim - len(np.atleast_1d(features)), g.ndim)), tuple(range(contract, kernel.ndim))
    rows = tuple(range(len(batch)))
    np.testing.assert_allclose(dx, np.tensordot(g, np.float64(kernel), axes=outs), rtol=2**-8, atol=1e-3)
    np.testing.assert_allclose(dk, np.tensordot(np.float64(x), g, axes=(rows, rows)), rtol=2**-8, atol=1e-3)


def test_only_for_cpus_is_bfloat16_multiplied_in_another_way() -> None:
    layer, x = Projection(replace(CONFIG, dtype="bfloat16"), 5, ("embed", "mlp")), jnp.ones((3, 6), "bfloat16")
    params, here = {"params": {"kernel": jnp.ones((6, 5), "bfloat16")}}, make_mesh(MeshConfig())
    assert here.abstract_mesh.abstract_device is not None
    for kind, wide in ((here.abstract_mesh.abstract_device.device_kind, True), ("NVIDIA H200", False)):
        device = copy(here.abstract_mesh.abstract_device)
        object.__setattr__(device, "device_kind", kind)
        with use_abstract_mesh(here.abstract_mesh.update(abstract_device=device)):
            traced = str(jax.make_jaxpr(layer.apply)(params, x))
        assert ("preferred_element_type=float32" in traced) == wide


def test_products_of_bfloat16_on_a_mesh_gather_neither_kernel_nor_rows() -> None:
    """Their rows and features are flattened, of which the first axes are sharded."""
    mesh = make_mesh(MeshConfig(data=2, tensor=4))
    layer = Projection(replace(CONFIG, dtype="bfloat16"), (4, 8), ("embed", "heads", "head"))
    x = jax.random.normal(jax.random.key(1), (4, 3, 16), "bfloat16")
    kernel = jax.random.normal(jax.random.key(0), (16, 4, 8), "bfloat16")

    @jax.jit
    def gradient(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.grad(lambda x, k: jnp.sum(layer.apply({"params": {"kernel": k}}, x) ** 2), (0, 1))(x, kernel)

    with jax.set_mesh(mesh):
        sharded = jax.device_put((x, kernel), (P("data"), P(None, "tensor")))
        compiled = gradient.lower(*sharded).compile()
        got = compiled(*sharded)
    lines = [line for lines in Program(compiled.as_text()).computations.values() for line in lines]
    assert {line.opcode.removesuffix("-start") for line in collectives(lines)} == {"all-reduce"}
    for ours, theirs in zip(got, gradient(x, kernel), strict=True):
        np.testing.assert_allclose(np.float64(ours), np.float64(theirs), rtol=0.05, atol=0.5)

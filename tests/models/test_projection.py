"""Dense layers: two rows a CPU takes one by one, others it multiplies by a kernel that is turned or in halves."""

from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jax.sharding import use_abstract_mesh

from models import projection
from models.config import DecoderConfig
from models.decoder import init_decoder, make_policy
from models.drafts.eagle3 import Eagle3Config, init_eagle3, make_eagle3
from models.drafts.mtp import init_mtp, make_mtp, mtp_config
from models.params import abstract_params
from models.projection import LAID_OUT_SIZE, Projection, laid_out
from specjax.parallel.mesh import MeshConfig, decoding_options, make_mesh
from specjax.rollout.generate import prepare
from specjax.testing.hlo import Program, collectives
from specjax.types import Params
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


@pytest.mark.parametrize(
    ("batch", "turned_rows"),
    [((7,), 0), ((3, 4), 0), ((13,), 16), ((16,), 16), ((5, 4), 0), ((6, 5), 32), ((48,), 48), ((7, 7), 0)],
)
@pytest.mark.parametrize(("inner", "contract", "features"), [((6,), 1, (2, 4)), ((2, 4), 2, 6)])
def test_rows_that_nearly_fill_vectors_do_and_are_multiplied_by_the_turned_kernel(
    batch, turned_rows, inner, contract, features, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is doubled here, by which one sees that it is the one that was read."""
    monkeypatch.setattr(projection, "LAID_OUT_SIZE", 1)
    layer = Projection(CONFIG, features, ("embed", "heads", "head"), contract, bias=True)
    x = jax.random.normal(jax.random.key(1), (*batch, *inner))
    params = layer.init(jax.random.key(0), x)["params"]
    params = {name: jnp.asarray(box.value) for name, box in params.items()} | {"bias": jnp.ones(features)}
    made = laid_out(params)
    np.testing.assert_array_equal(made["turned"], np.transpose(params["kernel"]))
    made["turned"] *= 2
    traced = jax.jit(layer.apply).trace({"params": made}, x)
    (product,) = (line for line in traced.jaxpr.eqns if line.primitive.name == "dot_general")
    assert product.outvars[0].aval.shape[-1] == (turned_rows or np.atleast_1d(features)[-1])
    got = traced.lower().compile()({"params": made}, x)
    times = 2 if turned_rows else 1
    np.testing.assert_allclose(got, times * np.tensordot(x, params["kernel"], axes=len(inner)) + 1, atol=1e-5)


@pytest.mark.parametrize(
    ("batch", "halved"), [((4,), False), ((5,), True), ((4, 4), True), ((24,), True), ((25,), False)]
)
def test_five_to_24_rows_are_multiplied_by_two_halves_of_a_kernel_that_narrows(
    batch, halved, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are doubled here, by which one sees that it is they that were read."""
    monkeypatch.setattr(projection, "LAID_OUT_SIZE", 1)
    layer, x = Projection(CONFIG, 4, ("mlp", "embed")), jax.random.normal(jax.random.key(1), (*batch, 8))
    kernel = jax.random.normal(jax.random.key(0), (8, 4))
    made = laid_out({"kernel": kernel})
    np.testing.assert_array_equal(jnp.concatenate(made["halves"], axis=1), kernel)
    assert [half.shape for half in made["halves"]] == [(8, 2), (8, 2)]
    got = jax.jit(layer.apply)({"params": made | {"halves": jax.tree.map(lambda x: 2 * x, made["halves"])}}, x)
    np.testing.assert_allclose(got, (2 if halved else 1) * np.tensordot(x, kernel, axes=1), atol=1e-5)


def test_only_large_kernels_in_float32_are_laid_out_anew_and_all_else_stays() -> None:
    large = jnp.ones((LAID_OUT_SIZE // 512, 512))
    params = {
        "layer": {"gate": {"kernel": large, "bias": jnp.ones(512)}, "small": {"kernel": large[1:]}},
        "half": {"kernel": large.astype("bfloat16")},
        "embed": {"embedding": large},
    }
    made = laid_out(params)
    added = made["layer"]["gate"].pop("turned")
    assert added.shape == (512, LAID_OUT_SIZE // 512)
    assert jax.tree.all(jax.tree.map(lambda x, y: x is y, made, params))


@pytest.mark.parametrize(
    ("shape", "halved"),
    [((1024, 512), True), ((1022, 512), False), ((512, 1024), False), ((2048, 255), False), ((16, 64, 512), False)],
)
def test_only_matrices_that_narrow_to_half_or_less_are_halved(shape, halved) -> None:
    assert ("halves" in laid_out({"kernel": jnp.ones(shape)})) == halved


def test_nothing_is_laid_out_anew_but_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    params = {"down": {"kernel": jnp.ones((1024, 512))}}
    assert laid_out(params)["down"].keys() == {"kernel", "turned", "halves"}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert laid_out(params) is params


@pytest.mark.parametrize(
    ("rows", "shape", "products"),
    [
        (7, (512, 1024), [(7, 1024)]),
        (16, (512, 1024), [(1024, 16)]),
        (7, (1024, 512), [(7, 256)] * 2),
        (16, (1024, 512), [(16, 256)] * 2),
        (32, (1024, 512), [(512, 32)]),
    ],
)
def test_a_product_copies_no_kernel(rows, shape, products) -> None:
    """A turned one XLA would transpose for each product anew; halves it could put together again."""
    layer = Projection(CONFIG, shape[1], ("mlp", "embed"))
    params = {"params": laid_out({"kernel": jnp.ones(shape)})}
    run = jax.jit(layer.apply, compiler_options=AS_SHIPPED | decoding_options(jnp.dtype("float32")))
    program = Program(run.lower(params, jnp.ones((rows, shape[0]))).compile().as_text())
    lines = [line for computation in program.computations.values() for line in computation]
    assert [line.arrays for line in lines if line.opcode == "dot"] == [[product] for product in products]
    kernels = {shape, shape[::-1], (shape[0], shape[1] // 2)}
    assert {line.opcode for line in lines if kernels & {*line.arrays}} == {"parameter"}


def test_whatever_a_rollout_takes_of_a_policy_and_of_the_heads_on_it_is_laid_out_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(projection, "LAID_OUT_SIZE", 1)
    config = replace(CONFIG, feature_layers=(0,))
    policy, shape = (
        make_policy(config),
        dict(hidden_size=6, intermediate_size=8, num_heads=2, num_kv_heads=1, head_dim=4),
    )
    eagle3 = Eagle3Config(feature_size=6, vocab_size=8, draft_vocab_size=8, **shape)
    mtp = mtp_config(config, "mimo")
    inits: dict[Any, Any] = {
        make_eagle3(eagle3, policy): partial(init_eagle3, eagle3),
        make_mtp(mtp, policy): partial(init_mtp, mtp),
    }
    for drafter, init in inits.items():
        abstract = Params(abstract_params(partial(init_decoder, config)), abstract_params(init))
        made = jax.eval_shape(partial(prepare, policy=policy, drafter=drafter), abstract)
        for before, after in ((abstract.policy, made.policy), (abstract.draft, made.draft)):
            keys = [part.key for path, _ in jax.tree.leaves_with_path(after) for part in path if hasattr(part, "key")]
            assert keys.count("turned") == keys.count("kernel") > 5
            added = keys.count("turned") + keys.count("halves")
            assert len(jax.tree.leaves(after)) == len(jax.tree.leaves(before)) + added


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

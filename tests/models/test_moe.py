"""The mixture of experts: its three implementations, its sum over the mesh, and gradients through that sum."""

from collections.abc import Callable
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from models import moe
from models.config import DecoderConfig, ExpertsConfig
from models.decoder import init_decoder, make_policy
from models.moe import MoE
from models.params import abstract_params, by_path, init_params
from specjax import kernels
from specjax.kernels import row_groups
from specjax.parallel.mesh import BATCH_AXES, MeshConfig, make_mesh
from specjax.testing.hlo import Program, collectives
from specjax.types import PolicyOutput, PyTree
from tests.refusals import refuses
from tests.specjax.training import relative_gap

EXPERTS = ExpertsConfig(num_experts=8, active=2, intermediate_size=12, norm_topk_prob=True, layers=(0, 2))
SHAPE = dict(hidden_size=16, intermediate_size=32, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=16)
CONFIG = DecoderConfig(**SHAPE, num_layers=3, qk_norm=True, experts=EXPERTS)
INIT = partial(init_decoder, CONFIG)
POLICY = make_policy(CONFIG)
TOKENS = np.random.default_rng(0).integers(0, 16, (4, 10)).astype(np.int32)


@pytest.fixture(scope="module")
def block() -> tuple[MoE, PyTree, np.ndarray]:
    """Return a mixture with its parameters, and six tokens."""
    module = MoE(CONFIG, EXPERTS)
    x = np.random.default_rng(1).normal(size=(2, 3, 16)).astype(np.float32)
    return module, initial(module, x), x


def initial(module: MoE, x: np.ndarray) -> PyTree:
    return nn.unbox(jax.jit(lambda *given: module.init(*given, None, decoding=False))(jax.random.key(0), x))


def in_float64(params: PyTree, x: np.ndarray, routes: np.ndarray | None = None) -> np.ndarray:
    """Return the mixture's output in float64, computed one token and one expert at a time."""
    p = {"/".join(path): np.asarray(leaf, np.float64) for path, leaf in by_path(params["params"]).items()}
    out = np.zeros(x.shape)
    for place in np.ndindex(x.shape[:2]):
        token = x[place].astype(np.float64)
        scores = np.exp(token @ p["router"])
        probs = scores / scores.sum()
        used = np.argsort(-probs)[: EXPERTS.active] if routes is None else routes[place]
        for expert in used:
            gate, up = token @ p["experts/gate"][expert], token @ p["experts/up"][expert]
            share = probs[expert] / probs[used].sum()
            out[place] += share * ((gate / (1 + np.exp(-gate)) * up) @ p["experts/down"][expert])
    return out


@pytest.mark.parametrize("form", ["sorted", "dense", "gathered"])
def test_all_implementations_of_a_mixture_agree(form: str, block, monkeypatch: pytest.MonkeyPatch):
    module, params, x = block
    taken = []
    for name in ("_sorted", "_dense", "_gathered"):
        own = getattr(moe, name)
        monkeypatch.setattr(moe, name, lambda *args, own=own, name=name: taken.append(name) or own(*args))
    monkeypatch.setattr(moe, "GATHER_COST", 0 if form == "gathered" else 3)
    y, routing = jax.jit(lambda *given: module.apply(*given, None, decoding=form != "sorted"))(params, x)
    assert taken == [f"_{form}"]
    np.testing.assert_allclose(y, in_float64(params, x), atol=2e-6)
    assert routing.chosen.shape == (2, 3, 2) and routing.probs.shape == (2, 3, 8)
    np.testing.assert_allclose(jnp.sum(routing.probs, axis=-1), 1.0, rtol=1e-6)


def test_given_routes_are_used_and_the_routers_own_are_reported(block):
    module, params, x = block
    routes = np.random.default_rng(2).permuted(np.tile(np.arange(8, dtype=np.uint8), (2, 3, 1)), axis=-1)[..., :2]
    apply = jax.jit(lambda *given: module.apply(*given, decoding=False))
    y, routing = apply(params, x, routes)
    np.testing.assert_allclose(y, in_float64(params, x, routes), atol=2e-6)
    np.testing.assert_array_equal(routing.chosen, apply(params, x, None)[1].chosen)


def test_many_tokens_of_a_forward_with_a_cache_are_sorted(block, monkeypatch: pytest.MonkeyPatch):
    module, params, x = block
    monkeypatch.setattr(moe, "MOST_DENSE", 5)
    monkeypatch.setattr(moe, "_dense", None)
    jax.eval_shape(lambda *given: module.apply(*given, None, decoding=True), params, x)


def loss(params: PyTree, tokens: jax.Array, **options) -> tuple[jax.Array, PolicyOutput]:
    output = make_policy(CONFIG, **options).apply(params, tokens, jnp.zeros(len(tokens), jnp.int32))
    return jnp.mean(output.logits**2), output


@pytest.fixture(scope="module")
def single() -> tuple[PolicyOutput, PyTree]:
    """Return a forward of whole rows on one device without a mesh, and the gradient of a loss."""
    params = jax.device_get(init_params(INIT, jax.random.key(0), make_mesh(MeshConfig())))
    (_, output), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, jnp.asarray(TOKENS))
    return output, gradient


MESHES = {
    "4 experts": MeshConfig(expert=4),
    "2 experts, tensor, data": MeshConfig(data=2, expert=2, tensor=2),
    "2 experts, fsdp": MeshConfig(fsdp=4, expert=2),
}


@pytest.mark.parametrize("name", [*list(MESHES)[:2], pytest.param("2 experts, fsdp", marks=pytest.mark.slow)])
def test_every_mesh_has_the_same_logits_and_gradients_with_one_sum_a_layer(name: str, single):
    config, mesh = MESHES[name], make_mesh(MESHES[name])
    run = partial(loss, remat="full" if config.fsdp > 1 else "none")
    with jax.set_mesh(mesh):
        given = init_params(INIT, jax.random.key(0), mesh), jax.device_put(TOKENS, NamedSharding(mesh, P(BATCH_AXES)))
        (_, output), gradient = jax.jit(jax.value_and_grad(run, has_aux=True))(*given)
    np.testing.assert_allclose(output.logits, single[0].logits, atol=1e-5)
    np.testing.assert_array_equal(output.routing.chosen, single[0].routing.chosen)
    assert relative_gap(gradient, single[1]) < 1e-5
    if config.tensor == config.fsdp == 1:
        with jax.set_mesh(mesh):
            program = Program(jax.jit(run).lower(*given).compile().as_text() or "")
        lines = [line for lines in program.computations.values() for line in lines]
        sums = [line for line in collectives(lines) if line.elements >= TOKENS.size * CONFIG.hidden_size]
        assert len(sums) == len(CONFIG.expert_layers), [line.line for line in sums]


def test_gradients_through_the_sum_are_those_of_float64(single, monkeypatch: pytest.MonkeyPatch):
    """Compare with directional derivatives in float64, by central differences of the reference mixture."""
    module = MoE(CONFIG, EXPERTS)
    x = np.random.default_rng(1).normal(size=(4, 3, 16)).astype(np.float32)
    params = initial(module, x)
    weight = np.random.default_rng(3).normal(size=x.shape)

    def loss(params: PyTree, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.asarray(weight, jnp.float32) * module.apply(params, x, None, decoding=False)[0])

    mesh = make_mesh(MeshConfig(data=2, expert=2, tensor=2))
    with jax.set_mesh(mesh):
        gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, jnp.asarray(x))
    rng, flat = np.random.default_rng(4), by_path(params["params"])
    for path, own in [*by_path(gradients[0]["params"]).items(), (("x",), gradients[1])]:
        direction = rng.normal(size=own.shape)

        def moved(by: float, path=path, direction=direction) -> float:
            values = {name: np.asarray(leaf, np.float64) for name, leaf in flat.items()}
            inputs = x.astype(np.float64)
            if path == ("x",):
                inputs = inputs + by * direction
            else:
                values[path] = values[path] + by * direction
            tree: PyTree = {"router": values["router",], "experts": {}}
            tree["experts"] = {name: values["experts", name] for name in ("gate", "up", "down")}
            return float(np.sum(weight * in_float64({"params": tree}, inputs)))

        expected = (moved(1e-6) - moved(-1e-6)) / 2e-6
        found, norm = np.vdot(np.asarray(own, np.float64), direction), float(np.linalg.norm(own))
        assert abs(found - expected) < 1e-5 * norm, path


def test_experts_are_split_over_their_axes():
    mesh = make_mesh(MeshConfig(fsdp=2, expert=2, tensor=2))
    found = by_path(jax.tree.map(lambda x: x.sharding.spec, abstract_params(INIT, mesh)))
    assert found["layer_0", "mlp", "experts", "up"] == P(("expert",), ("fsdp",), ("tensor",))
    assert found["layer_0", "mlp", "experts", "down"] == P(("expert",), ("tensor",), ("fsdp",))
    assert found["layer_0", "mlp", "router"] == P(("fsdp",), None)
    assert found["layer_1", "mlp", "up", "kernel"] == P(("fsdp",), ("tensor",))
    assert POLICY.mixture == (2, 8, 2) and POLICY.mixture.dtype == "uint8"
    with refuses("num_experts = 8: must be a multiple of mesh.expert = 3"):
        abstract_params(INIT, make_mesh(MeshConfig(expert=3)))


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(active=9), "active = 9: must be at most num_experts = 8"),
        (dict(layers=()), "layers = (): ...at least one layer"),
        (dict(num_experts=0), "num_experts = 0: "),
    ],
)
def test_invalid_mixtures_are_refused(changes: dict, message: str):
    with refuses(message):
        ExpertsConfig(**{**dict(num_experts=8, active=2, intermediate_size=12), **changes})
    with refuses("experts.layers = (0, 2): ...0 .. 1"):
        DecoderConfig(**SHAPE, num_layers=2, experts=EXPERTS)


@partial(jax.jit, static_argnums=0)
def product_and_gradients(own: Callable, sizes: jax.Array, cotangent: jax.Array, *factors: jax.Array) -> PyTree:
    y, back = jax.vjp(partial(own, sizes=sizes), *factors)
    return y, *back(cotangent)


@pytest.mark.parametrize("sizes", [(3, 0, 5, 1), (0, 0, 0, 0), (4, 4, 4, 4), (0, 0, 16, 0)])
def test_a_grouped_product_multiplies_each_row_by_the_matrix_of_its_group(sizes: tuple[int, ...], monkeypatch):
    """This holds for XLA's own operation and for blocks of 4 rows. Rows after the last group, of 16, become zero."""
    monkeypatch.setattr(row_groups, "BLOCK", 4)
    rng = np.random.default_rng(0)
    x, weights = rng.normal(size=(16, 6)).astype(np.float32), rng.normal(size=(4, 6, 5)).astype(np.float32)
    cotangent = rng.normal(size=(16, 5)).astype(np.float32)
    group = np.repeat(np.arange(5), [*sizes, 16 - sum(sizes)])
    padded = np.concatenate([weights, np.zeros((1, 6, 5), np.float32)])
    expected = np.einsum("md,mdf->mf", x, padded[group])
    by_x = np.einsum("mf,mdf->md", cotangent, padded[group])
    by_weights = np.stack([x[group == g].T @ cotangent[group == g] for g in range(4)])
    for own in (kernels.cpu.grouped, kernels.plain.grouped):
        run, given = partial(product_and_gradients, own, np.array(sizes, np.int32)), (cotangent, x, weights)
        for found, wanted in zip(run(*given), (expected, by_x, by_weights), strict=True):
            np.testing.assert_allclose(found, wanted, atol=1e-5)
        narrow = [np.asarray(each, jnp.bfloat16) for each in given]
        for found, wanted in zip(run(*narrow)[1:], (by_x, by_weights), strict=True):
            np.testing.assert_allclose(np.asarray(found, np.float32), wanted, atol=0.1)

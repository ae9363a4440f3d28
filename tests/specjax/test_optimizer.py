import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from specjax.param_labels import hidden_matrices
from specjax.train.optimizer import (
    OptimizerConfig,
    apply_gradients,
    init_moments,
    learning_rate,
    make_optimizer,
    make_optimizers,
    update,
)
from specjax.types import Params, PyTree
from tests.specjax.training import mesh_of, params_on, relative_gap, state_on

FINITE = Params(jnp.bool(True), jnp.bool(True))


def run(policy: OptimizerConfig, draft: OptimizerConfig | None, gradients: list[Params], params: Params):
    """Return the parameters and the optimiser states after each gradient."""
    optimizers = make_optimizers(policy, draft)
    states = Params(optimizers.policy.init(params.policy), optimizers.draft.init(params.draft))
    history, step = [], jax.jit(functools.partial(apply_gradients, optimizers))
    for gradient in gradients:
        params, states = step(gradient, states, params, FINITE)
        history.append((params, states))
    return history


def adamw(c: OptimizerConfig, gradients: list[np.ndarray], w: np.ndarray) -> np.ndarray:
    """Return parameters after AdamW (Loshchilov and Hutter 2019, algorithm 2) in float64, with the norm clipped."""
    w, m, v = w.astype(np.float64), 0.0, 0.0
    for t, g in enumerate(gradients):
        g = g * min(1.0, c.clip_norm / np.linalg.norm(g))
        m, v = c.b1 * m + (1 - c.b1) * g, c.b2 * v + (1 - c.b2) * g**2
        rate = c.learning_rate * min(1.0, (t + 1) / (c.warmup_steps + 1))
        step = (m / (1 - c.b1 ** (t + 1))) / (np.sqrt(v / (1 - c.b2 ** (t + 1))) + 1e-8)
        w = w - rate * (step + (c.weight_decay * w if w.ndim > 1 else 0.0))
    return w


def muon(c: OptimizerConfig, gradients: list[np.ndarray], w: np.ndarray) -> np.ndarray:
    """Return parameters after Muon (Jordan et al. 2024) in float64.

    Five Newton-Schulz steps on the Nesterov momentum, scaled to the size of AdamW's update (arXiv 2502.16982,
    equation 4).
    """
    w, m, b = w.astype(np.float64), 0.0, c.momentum
    for t, g in enumerate(gradients, start=1):
        m = b * m + (1 - b) * g
        x = b * m / (1 - b ** (t + 1)) + (1 - b) * g / (1 - b**t)
        x = x / np.linalg.norm(x)
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        w = w - c.learning_rate * (0.2 * np.sqrt(max(w.shape)) * x + c.weight_decay * w)
    return w


@pytest.mark.parametrize(
    "config",
    [
        OptimizerConfig(learning_rate=0.1),
        OptimizerConfig(learning_rate=0.1, warmup_steps=3, b1=0.8, b2=0.95, weight_decay=0.1, clip_norm=0.5),
    ],
)
def test_each_network_follows_adamw_by_its_own_options(config: OptimizerConfig) -> None:
    rng = np.random.default_rng(0)
    gradients = [rng.normal(size=(5, 1)) * scale for scale in (1.0, 10.0, 0.1, 3.0, 1.0)]
    weights, other = rng.normal(size=(5, 1)), OptimizerConfig(learning_rate=0.03)
    for policy, draft in ((config, other), (other, config)):
        as_params = [Params(*(jnp.array(x, jnp.float32) for x in (g, 7 * g))) for g in gradients]
        start = Params(*(jnp.array(weights, jnp.float32) for _ in range(2)))
        final, _ = run(policy, draft, as_params, start)[-1]
        np.testing.assert_allclose(final.policy, adamw(policy, gradients, weights), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(final.draft, adamw(draft, [7 * g for g in gradients], weights), rtol=1e-4, atol=1e-5)


def test_norms_and_biases_do_not_decay() -> None:
    rng = np.random.default_rng(1)
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.3, clip_norm=1e9)
    shapes = {"q": {"kernel": (4, 2, 3), "bias": (2, 3)}, "norm": {"scale": (4,)}, "embed": {"embedding": (5, 4)}}
    weights, gradient = (_filled(shapes, rng) for _ in range(2))
    final, _ = run(config, None, [Params(gradient, {})], Params(weights, {}))[-1]
    decayed = {"q": {"kernel": 0.03, "bias": 0.0}, "norm": {"scale": 0.0}, "embed": {"embedding": 0.03}}

    def check(found: jax.Array, g: jax.Array, w: jax.Array, decay: float) -> None:
        g, w = np.asarray(g), np.asarray(w)
        expected = adamw(replace(config, weight_decay=0.0), [g], w) - decay * w
        np.testing.assert_allclose(found, expected, atol=1e-5)

    jax.tree.map(check, final.policy, gradient, weights, decayed)


def _filled(shapes: PyTree, rng: np.random.Generator) -> PyTree:
    leaves, structure = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    return structure.unflatten([jnp.array(rng.normal(size=shape), jnp.float32) for shape in leaves])


def rates(config: OptimizerConfig, count: int, steps: int | None = None) -> list[float]:
    """Return the learning rates. Without momentum, decay and clipping, AdamW's step is the rate times the sign."""
    optimizer = make_optimizer(replace(config, b1=0.0, b2=0.0, clip_norm=1e9), steps)
    weights, state, found = np.zeros(1, np.float32), optimizer.init(jnp.zeros(1)), []
    step, rate = jax.jit(functools.partial(update, optimizer)), jax.jit(functools.partial(learning_rate, config))
    for _ in range(count):
        logged = rate(state) if steps is None else None
        after, state = step(np.ones(1, np.float32), state, weights, np.True_)
        found.append(float((np.asarray(weights) - np.asarray(after))[0]))
        assert logged is None or logged == pytest.approx(found[-1], abs=1e-6)
        weights = after
    return found


def test_schedules_fall_to_their_floor_after_the_warm_up() -> None:
    """With a number of steps, the rate falls to zero by a cosine."""
    falling = [0.2 * (1 + np.cos(np.pi * i / 8)) for i in range(9)]
    config = OptimizerConfig(learning_rate=0.4, warmup_steps=3)
    np.testing.assert_allclose(rates(config, 12, 11), [0.1, 0.2, 0.3, *falling], atol=1e-6)
    config = OptimizerConfig(learning_rate=0.4, warmup_steps=1, schedule="linear", decay_steps=4, floor=0.25)
    np.testing.assert_allclose(rates(config, 7), [0.2, 0.4, 0.325, 0.25, 0.175, 0.1, 0.1], atol=1e-6)
    falling = [0.1 + 0.15 * (1 + np.cos(np.pi * i / 4)) for i in (0, 1, 2, 3, 4, 4)]
    np.testing.assert_allclose(rates(replace(config, schedule="cosine"), 7), [0.2, *falling], atol=1e-6)
    muon, weights = replace(config, kind="muon"), {"kernel": jnp.ones((4, 4))}
    assert learning_rate(muon, make_optimizer(muon).init(weights)) == pytest.approx(0.2)


MUON = OptimizerConfig(kind="muon", learning_rate=0.1, weight_decay=0.2, clip_norm=1e9)
NETWORK = {
    "attention": {"q": {"kernel": (12, 2, 4), "bias": (2, 4)}, "o": {"kernel": (2, 4, 12)}},
    "mlp": {"up": {"kernel": (12, 16)}},
    "norm": {"scale": (12,)},
    "embed": {"embedding": (20, 12)},
    "head": {"kernel": (12, 20)},
}
# Shapes as matrices: contracted dimensions by output dimensions.
HIDDEN = {("attention", "q"): (12, 8), ("attention", "o"): (8, 12), ("mlp", "up"): (12, 16)}


def test_muon_updates_inner_matrices_and_adam_all_other_parameters() -> None:
    rng = np.random.default_rng(2)
    weights, *gradients = (_filled(NETWORK, rng) for _ in range(3))
    as_params = [Params(g, {}) for g in gradients]
    once, final = (state[0].policy for state in run(MUON, None, as_params, Params(weights, {})))
    by_adam = run(replace(MUON, kind="adamw"), None, as_params, Params(weights, {}))[-1][0].policy
    for path, shape in HIDDEN.items():
        start, first, last, *steps = (
            np.asarray(tree[path[0]][path[1]]["kernel"], np.float64).reshape(shape)
            for tree in (weights, once, final, *gradients)
        )
        np.testing.assert_allclose(last, muon(MUON, steps, start), rtol=1e-4, atol=1e-4)
        # A step is nearly orthogonal: its singular values are about equal.
        moved = ((1 - 0.1 * 0.2) * start - first) / (0.1 * 0.2 * np.sqrt(max(shape)))
        singular = np.linalg.svd(moved, compute_uv=False)
        assert 0.6 < singular.min() and singular.max() < 1.3
    for name in ("norm", "embed", "head"):
        jax.tree.map(np.testing.assert_array_equal, final[name], by_adam[name])
    np.testing.assert_array_equal(final["attention"]["q"]["bias"], by_adam["attention"]["q"]["bias"])


def test_every_expert_of_a_stack_is_a_matrix_of_its_own() -> None:
    rng = np.random.default_rng(4)
    shapes = {"mlp": {"experts": {"up": (3, 12, 8)}, "router": (12, 3)}}
    weights, gradient = _filled(shapes, rng), _filled(shapes, rng)
    final = run(MUON, None, [Params(gradient, {})], Params(weights, {}))[-1][0].policy["mlp"]["experts"]["up"]
    for expert in range(3):
        start, step = (np.asarray(tree["mlp"]["experts"]["up"][expert], np.float64) for tree in (weights, gradient))
        np.testing.assert_allclose(final[expert], muon(MUON, [step], start), rtol=1e-4, atol=1e-4)


def test_the_axes_of_every_matrix_are_interpreted_correctly() -> None:
    params = params_on(mesh_of(1, 1, 1))
    policy, draft = (
        {jax.tree_util.keystr(path, simple=True, separator="/"): axes for path, axes in found}
        for found in (
            jax.tree.leaves_with_path(hidden_matrices(tree), is_leaf=lambda x: isinstance(x, tuple))
            for tree in (params.policy, params.draft)
        )
    )
    inputs_first, heads_first, flat = ((0,), (1, 2)), ((0, 1), (2,)), ((0,), (1,))
    layer = {f"attention/{name}/kernel": inputs_first for name in "qkv"} | {"attention/o/kernel": heads_first}
    layer |= {f"mlp/{name}/kernel": flat for name in ("gate", "up", "down")}
    assert policy == {f"layer_{i}/{name}": axes for i in (0, 1) for name, axes in layer.items()}
    assert draft == {"fc/kernel": flat, **layer}


def test_muon_on_a_mesh_equals_muon_on_one_device() -> None:
    weights, gradient = (_filled(NETWORK, np.random.default_rng(3)) for _ in range(2))
    alone = run(MUON, None, [Params(gradient, {})], Params(weights, {}))[-1][0].policy
    mesh, optimizer = mesh_of(2, 2, 2), make_optimizer(MUON)

    def axes(x: jax.Array) -> NamedSharding:
        return NamedSharding(mesh, P("fsdp", "tensor") if x.ndim == 2 else P("tensor"))

    layout = jax.tree.map(axes, weights)
    weights, gradient = jax.device_put((weights, gradient), (layout, layout))
    state = init_moments(optimizer, weights, mesh)
    laid_out = jax.tree.map(lambda x: x.sharding, state)
    (muon_state,) = (x for x in jax.tree.leaves(state, is_leaf=_is_muon) if _is_muon(x))
    assert muon_state.mu["mlp"]["up"]["kernel"].sharding == layout["mlp"]["up"]["kernel"]
    assert all(isinstance(x, NamedSharding) for x in jax.tree.leaves(laid_out))
    step = jax.jit(functools.partial(update, optimizer), out_shardings=(layout, laid_out), donate_argnums=(1, 2))
    found, state = step(gradient, state, weights, jnp.bool(True))
    assert relative_gap(found, alone) < 1e-5
    assert jax.tree.leaves(weights)[0].is_deleted()


def _is_muon(x: object) -> bool:
    return isinstance(x, optax.contrib.MuonState)


def test_parameters_keep_their_dtype_and_a_draft_without_a_config_is_not_updated() -> None:
    weights = Params(jnp.ones(3, jnp.bfloat16), jnp.ones(3))
    both, _ = run(OptimizerConfig(), OptimizerConfig(), [weights], weights)[-1]
    assert both.policy.dtype == jnp.bfloat16 and both.draft.dtype == jnp.float32
    still, _ = run(OptimizerConfig(learning_rate=0.1), None, [weights] * 2, weights)[-1]
    np.testing.assert_array_equal(still.draft, weights.draft)
    assert (still.policy < weights.policy).all()


def test_moments_are_laid_out_as_their_parameters() -> None:
    def layout(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: x.sharding, tree)

    state = state_on(mesh_of(2, 2, 2), with_reference=True)
    for name in ("policy", "draft"):
        (adam,) = (x for x in getattr(state.optimizer, name)[1] if isinstance(x, optax.ScaleByAdamState))
        expected = layout(getattr(state.params, name))
        assert any(not sharding.is_fully_replicated for sharding in jax.tree.leaves(expected))
        assert layout(adam.mu) == layout(adam.nu) == expected
    assert layout(state.reference) == layout(state.params.policy)

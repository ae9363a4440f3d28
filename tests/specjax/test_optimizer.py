import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specjax.optimizer import OptimizerConfig, apply_gradients, make_optimizer, make_optimizers, update
from specjax.types import Params, PyTree, TrainState
from tests.specjax.training import CONFIG, last_gradients, mesh_of, state_on


def run(policy: OptimizerConfig, draft: OptimizerConfig | None, gradients: list[Params], params: Params):
    """The parameters and the optimiser states after each of the gradients."""
    optimizers = make_optimizers(policy, draft)
    states = Params(optimizers.policy.init(params.policy), optimizers.draft.init(params.draft))
    history = []
    for gradient in gradients:
        params, states, _ = apply_gradients(optimizers, gradient, states, params)
        history.append((params, states))
    return history


def adamw(c: OptimizerConfig, gradients: list[np.ndarray], w: np.ndarray) -> np.ndarray:
    """Loshchilov and Hutter 2019, algorithm 2, in float64, behind a clip of the norm."""
    w, m, v = w.astype(np.float64), 0.0, 0.0
    for t, g in enumerate(gradients):
        g = g * min(1.0, c.clip_norm / np.linalg.norm(g))
        m, v = c.b1 * m + (1 - c.b1) * g, c.b2 * v + (1 - c.b2) * g**2
        rate = c.learning_rate * min(1.0, (t + 1) / (c.warmup_steps + 1))
        step = (m / (1 - c.b1 ** (t + 1))) / (np.sqrt(v / (1 - c.b2 ** (t + 1))) + 1e-8)
        w = w - rate * (step + c.weight_decay * w)
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
    gradients = [rng.normal(size=5) * scale for scale in (1.0, 10.0, 0.1, 3.0, 1.0)]
    weights, other = rng.normal(size=5), OptimizerConfig(learning_rate=0.03)
    for policy, draft in ((config, other), (other, config)):
        as_params = [Params(*(jnp.array(x, jnp.float32) for x in (g, 7 * g))) for g in gradients]
        start = Params(*(jnp.array(weights, jnp.float32) for _ in range(2)))
        final, _ = run(policy, draft, as_params, start)[-1]
        np.testing.assert_allclose(final.policy, adamw(policy, gradients, weights), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(final.draft, adamw(draft, [7 * g for g in gradients], weights), rtol=1e-4, atol=1e-5)


def test_with_steps_the_rate_falls_to_zero_by_a_cosine() -> None:
    """Without momentum, decay and clipping AdamW's step is the rate, in the direction of the gradient's sign."""
    optimizer = make_optimizer(OptimizerConfig(learning_rate=0.4, warmup_steps=3, b1=0.0, b2=0.0, clip_norm=1e9), 11)
    weights, state, rates = jnp.zeros(1), optimizer.init(jnp.zeros(1)), []
    for _ in range(12):
        after, state = update(optimizer, jnp.ones(1), state, weights)
        rates.append(float((weights - after)[0]))
        weights = after
    falling = [0.2 * (1 + np.cos(np.pi * i / 8)) for i in range(9)]
    np.testing.assert_allclose(rates, [0.1, 0.2, 0.3, *falling], atol=1e-6)


def test_without_a_config_the_draft_stands_still() -> None:
    weights = Params(jnp.ones(3), jnp.ones(3))
    final, _ = run(OptimizerConfig(learning_rate=0.1), None, [Params(jnp.ones(3), jnp.ones(3))] * 2, weights)[-1]
    np.testing.assert_array_equal(final.draft, weights.draft)
    assert (final.policy < weights.policy).all()


def test_parameters_keep_their_dtype() -> None:
    weights = Params(jnp.ones(3, jnp.bfloat16), jnp.ones(3))
    final, _ = run(OptimizerConfig(), OptimizerConfig(), [weights], weights)[-1]
    assert final.policy.dtype == jnp.bfloat16 and final.draft.dtype == jnp.float32


def test_the_transparent_optimiser_keeps_the_gradient_itself() -> None:
    gradient = Params(jnp.array([3e-5, -7.0, 0.0]), jnp.array([1e4]))
    history = run(CONFIG.policy_optimizer, CONFIG.draft_optimizer, [gradient] * 2, Params(jnp.ones(3), jnp.ones(1)))
    for params, states in history:
        kept = last_gradients(TrainState(jnp.int32(0), params, states, None))
        jax.tree.map(np.testing.assert_array_equal, kept, gradient)


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


@pytest.mark.parametrize(
    "options", [dict(learning_rate=-1.0), dict(warmup_steps=-1), dict(weight_decay=-0.1), dict(clip_norm=0.0)]
)
def test_options_out_of_range_are_refused_by_name(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        OptimizerConfig(**options)

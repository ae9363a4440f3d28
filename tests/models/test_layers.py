"""What decoders and draft heads share: dense layers, of which a CPU takes two rows one by one, and angles."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import unbox

from models.config import DecoderConfig
from models.decoder import init_decoder, make_policy
from models.projection import Projection
from specjax.testing.hlo import Program

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


def test_all_layers_turn_by_the_same_angles() -> None:
    config = replace(CONFIG, num_layers=3, feature_layers=())
    policy = make_policy(config)
    params = unbox(init_decoder(config, jax.random.key(0)))
    start, cache = jnp.array([2, 3], jnp.int32), policy.init_cache(2, 8)
    text = jax.jit(policy.apply).lower(params, jnp.zeros((2, 2), jnp.int32), start, cache).compile().as_text()
    lines = [line for computation in Program(text).computations.values() for line in computation]
    assert sum(line.opcode == "cosine" for line in lines) == 1

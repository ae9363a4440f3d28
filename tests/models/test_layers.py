"""What decoders and draft heads share: angles."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax.linen import unbox

from models.config import DecoderConfig
from models.decoder import init_decoder, make_policy
from specjax.testing.hlo import Program

CONFIG = DecoderConfig(
    vocab_size=8, hidden_size=6, intermediate_size=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4
)


def test_all_layers_turn_by_the_same_angles() -> None:
    config = replace(CONFIG, num_layers=3, feature_layers=())
    policy = make_policy(config)
    params = unbox(init_decoder(config, jax.random.key(0)))
    start, cache = jnp.array([2, 3], jnp.int32), policy.init_cache(2, 8)
    text = jax.jit(policy.apply).lower(params, jnp.zeros((2, 2), jnp.int32), start, cache).compile().as_text()
    lines = [line for computation in Program(text).computations.values() for line in computation]
    assert sum(line.opcode == "cosine" for line in lines) == 1

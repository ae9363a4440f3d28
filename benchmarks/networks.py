"""A small policy with a sharp distribution, and an EAGLE-3 head for it: random, or distilled in seconds."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from launch.setup.networks import Networks
from models.config import DecoderConfig
from models.decoder import init_decoder, make_policy
from models.drafts.eagle3 import Eagle3Config, init_eagle3, make_eagle3
from models.params import init_params
from specjax.drafters import NoDrafter
from specjax.keys import seed_step
from specjax.rollout.make_generate import make_generate
from specjax.rollout.plan import RolloutConfig
from specjax.sampling import SamplingLaw
from specjax.train.optimizer import OptimizerConfig, make_optimizer, update, usable
from specjax.types import Params, Prompts, PyTree

VOCAB = 128


def small(layers: int, mesh: Mesh, width: int = 64) -> Networks:
    """Return random networks: a policy with `layers` layers, and a one-layer head that reads at most three of them."""
    shape: dict[str, Any] = dict(
        hidden_size=width, intermediate_size=4 * width, num_heads=4, num_kv_heads=2, head_dim=16
    )
    feature_layers = tuple(sorted({0, layers // 2, layers - 1}))
    decoder = DecoderConfig(vocab_size=VOCAB, num_layers=layers, feature_layers=feature_layers, **shape)
    config = Eagle3Config(feature_size=len(feature_layers) * width, vocab_size=VOCAB, draft_vocab_size=VOCAB, **shape)
    policy, keys = make_policy(decoder), jax.random.split(jax.random.key(0))
    weights = init_params(partial(init_decoder, decoder), keys[0], mesh)
    # Scaled so that the last token dominates the context, and sharp: a head learns such a distribution quickly.
    weights |= {"embed": jax.tree.map(lambda x: 0.75 * layers * width**0.5 * x, weights["embed"])}
    params = Params(weights, init_params(partial(init_eagle3, config), keys[1], mesh))
    return Networks(decoder, policy, make_eagle3(config, policy), at_temperature(params, 0.3, "policy"))


def at_temperature(params: Params, temperature: float, *names: str) -> Params:
    """Return `params` with the logits of the named networks divided by `temperature`.

    The weights carry the temperature, so one compiled program serves all temperatures.
    """

    def scaled(weights: PyTree) -> PyTree:
        return weights | {"head": jax.tree.map(lambda x: x / temperature, weights["head"])}

    return replace(params, **{name: scaled(getattr(params, name)) for name in names})


def random_prompts(rng: np.random.Generator, count: int, width: int) -> Prompts:
    """Return `count` prompts of `width` random tokens each, with ids 0, 1, .."""
    tokens = rng.integers(0, VOCAB, (count, width)).astype(np.int32)
    return Prompts(jnp.asarray(tokens), jnp.full(count, width, jnp.int32), jnp.arange(count, dtype=jnp.int32))


def distilled(networks: Networks, mesh: Mesh, steps: int) -> Networks:
    """Return the networks after `steps` optimiser steps of the head on the policy's answers to random prompts."""
    count, width, budget = 256, 4, 28
    policy, drafter, law, params = networks.policy, networks.drafter, SamplingLaw(), networks.params
    prompts = random_prompts(np.random.default_rng(7), count, width)
    plain = RolloutConfig(group_size=1, max_new_tokens=budget, draft_length=0)
    answers = make_generate(policy, NoDrafter(), plain, mesh)(replace(params, draft={}), prompts, seed_step(7, 0))
    data = jnp.concatenate([prompts.tokens, answers.tokens], axis=1)
    counts = jnp.broadcast_to(jnp.arange(width + budget)[None] >= width, data.shape)
    rate = 0.04 / networks.policy.embedding(networks.params.policy).shape[1] ** 0.5
    optimizer = make_optimizer(OptimizerConfig(learning_rate=rate, warmup_steps=20, b2=0.98))
    batches = np.random.default_rng(8).integers(0, count, (steps, 32))

    @jax.jit
    def train(params: Params) -> PyTree:
        everything = data, policy.apply(params.policy, data, jnp.zeros(count, jnp.int32)), counts

        def step(carry: tuple[PyTree, PyTree], rows: jax.Array) -> tuple[tuple[PyTree, PyTree], None]:
            draft, moments = carry
            tokens, output, mask = jax.tree.map(lambda x: x[rows], everything)

            def loss(draft: PyTree) -> jax.Array:
                return drafter.loss(replace(params, draft=draft), tokens, output, mask, law).loss

            value, gradient = jax.value_and_grad(loss)(draft)
            return update(optimizer, gradient, moments, draft, usable(gradient, value)), None

        return jax.lax.scan(step, (params.draft, optimizer.init(params.draft)), jnp.asarray(batches))[0][0]

    with jax.set_mesh(mesh):
        return replace(networks, params=replace(params, draft=train(params)))

"""Rollouts of a policy with adapters follow its exact law, beside a base in the compute dtype or in 8 bits."""

import functools
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.decoder import init_decoder
from models.lora import LoraConfig, adapted_layers, init_adapters, with_scales
from specjax.adapters import joined, merged
from specjax.keys import seed_step
from specjax.quantization import dequantized, quantized
from specjax.rollout.generate import prepare
from specjax.rollout.plan import RolloutConfig
from specjax.rollout.speculative import speculative_rollout
from specjax.sampling import SamplingLaw
from specjax.testing import assert_lossless
from specjax.testing.exact import Cells, completion_law, count_completions, fit
from specjax.types import EightBit, Params, Prompts, PyTree, Rollout
from specjax.verify import VERIFIERS, VerifierName
from tests.specjax.training import mesh_of
from tests.tiny import ENUMERABLE, World, chosen

BUDGET, DRAWS, BASES = 4, 2**14, (None, "int8", "fp8")
# Drafter of each kind, by the name of its parameters.
KINDS = {
    "none": "none",
    "trained": "eagle3",
    "random reduced": "eagle3 reduced",
    "trained mtp": "mtp",
    "trained dflash": "dflash",
    "random dspark reduced": "dspark reduced",
    "identical": "policy",
    "table": "table",
    "ngram": "ngram",
    "remembered": "history",
    "stranger": "model",
    "random beside ngram": "either",
    "trained beside remembered": "either history",
}
COVERING = [("random beside ngram", None), ("random dspark reduced", "int8")]
CASES = [
    pytest.param(draft, base, verifier, marks=() if (draft, base) in COVERING else pytest.mark.slow)
    for draft in KINDS
    for base in BASES
    for verifier in VERIFIERS
]


@dataclass(frozen=True)
class AdaptedWorld(World):
    """A world whose policy has adapters far from zero, beside a base in 8 bits or in float32."""

    base_dtype: EightBit | None = None

    @functools.cached_property
    def policy_params(self) -> PyTree:  # pyright: ignore[reportIncompatibleVariableOverride]
        return joined(params_with(self.base_dtype)).policy


@functools.cache
def world(base: EightBit | None) -> AdaptedWorld:
    own = {field.name: getattr(ENUMERABLE, field.name) for field in fields(World)}
    return AdaptedWorld(**own, base_dtype=base)


@functools.cache
def params_with(base_dtype: EightBit | None) -> Params:
    """Return adapters and their base, apart.

    The first input of the normed layers is zero, and its weights are large. So the other weights of a channel have few
    of the steps of int8, and rounding moves the law far enough to be seen in few draws.
    """
    layers, mesh = adapted_layers(partial(init_decoder, ENUMERABLE.config), LoraConfig(rank=2, alpha=4.0)), mesh_of(1)
    rng = np.random.default_rng(2)
    shapes = jax.eval_shape(partial(init_adapters, layers), jax.random.key(0))
    adapters = jax.tree.map(lambda x: jnp.float32(0.5 * rng.standard_normal(x.shape)), nn.unbox(shapes))
    flat: dict[tuple[str, ...], Any] = flax.traverse_util.flatten_dict(jax.tree.map(np.array, ENUMERABLE.policy_params))
    for path, x in flat.items():
        if path[-1] == "scale" and x.shape == (ENUMERABLE.hidden,):
            x[0] = 0.0
        if path[-1] == "kernel" and path[-2] not in ("o", "down"):
            x[0] = 8 * np.max(np.abs(x))
    base = jax.tree.map(jnp.asarray, flax.traverse_util.unflatten_dict(flat))
    return Params(adapters, {}, base=with_scales(quantized(base, base_dtype) if base_dtype else base, layers, mesh))


@functools.cache
def exact(base: EightBit | None, *, adapters: bool = True) -> Cells:
    """Return the law of Q(W) + s A B, multiplied out in float32; of Q(W) without adapters."""
    own = world(base)
    params = params_with(base)
    params = replace(params, base=jax.jit(dequantized)(params.base))
    weights = jax.jit(merged)(params).policy if adapters else params.base
    forward = jax.jit(own.policy.apply)

    def logits(tokens: np.ndarray) -> np.ndarray:
        rows = jnp.asarray(tokens, jnp.int32)
        return np.asarray(forward(weights, rows, jnp.zeros(len(rows), jnp.int32)).logits)

    return completion_law(logits, own.prompts[0], own.vocab, own.stops, BUDGET, SamplingLaw())


@functools.cache
def program(draft: str, base: EightBit | None):
    """Return a program (params, prompts, index of the verifier) -> DRAWS samples, which prepares its parameters."""
    own, length = world(base), 0 if draft == "none" else 2
    drafter = own.drafters[KINDS[draft]]

    @jax.jit
    def run(params: Params, prompts: Prompts, verifier: jax.Array) -> Rollout:
        options = dict(max_new_tokens=BUDGET, draft_length=length, stop_tokens=own.stops)
        config = RolloutConfig(group_size=DRAWS, verifier=chosen(verifier), **options)
        params = prepare(own.policy, drafter, params)
        return speculative_rollout(own.policy, drafter, params, prompts, seed_step(3, 0), config)

    return run


@pytest.mark.parametrize("draft, base, verifier", CASES)
def test_completions_follow_the_base_with_adapters(draft: str, base: EightBit | None, verifier: VerifierName):
    """16,384 draws, level 1e-6, power above 0.99 at total variation 0.06."""
    own = world(base)
    drafting = own.params(draft)
    params = replace(params_with(base), draft=drafting.draft, memory=drafting.memory)
    rollout = program(draft, base)(params, own.batch, jnp.int32(list(VERIFIERS).index(verifier)))
    assert draft == "none" or np.asarray(rollout.drafted).sum() > 0
    counts = count_completions(rollout)
    result = fit(counts, exact(base), total_variation=0.06)
    assert result.draws == DRAWS and result.passes and result.power > 0.99, result
    # Neither the base's, nor the law of the weights before they were rounded, which is nearer in fp8.
    assert not fit(counts, exact(base, adapters=False), total_variation=0.06).passes
    if base == "int8":
        assert not fit(counts, exact(None), total_variation=0.06).passes


def test_the_public_assertion_takes_parameters_with_a_base():
    own = world("int8")
    params = replace(params_with("int8"), draft={"scale": jnp.float32(0.4)})
    options = dict(max_new_tokens=BUDGET, draft_length=2, stop_tokens=own.stops, verifier="block")
    config = RolloutConfig(group_size=DRAWS, **options)
    drafter = own.drafters["policy"]
    result = assert_lossless(
        own.policy, drafter, params, config, prompt=own.prompts[0], draws=DRAWS, total_variation=0.06
    )
    assert result.passes

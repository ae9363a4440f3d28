"""Turns with adapters, a base of 8 bits and a mixture of experts: as with one turn, and as with whole forwards."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.keys import seed_step
from specjax.rollout.make_generate import make_generate
from specjax.rollout.plan import RolloutConfig
from specjax.train.batch import join_completions
from specjax.types import EightBit, Rollout
from tests.specjax import test_mixture, training
from tests.specjax.sums import HostSums, Sums
from tests.specjax.test_adapters import adapted_params

RULE, PROMPTS = Sums(training.VOCAB), training.make_prompts()
CONFIG = replace(
    training.CONFIG.rollout, verifier="coupled", environment=RULE, turns=4, turn_tokens=8, stop_tokens=(3, 7, 11)
)


def assert_same(rollout: Rollout, expected: Rollout, *names: str) -> None:
    for name in ("tokens", "lengths", "full", "writer", "accepted", *names):
        np.testing.assert_array_equal(getattr(rollout, name), getattr(expected, name), err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("base", [None, "int8"])
def test_adapters_generate_alike_on_the_host_and_in_jax(base: EightBit | None):
    mesh, (policy, drafter) = training.mesh_of(2), training.networks()
    params, run = adapted_params(mesh, b_scale=0.3, base_dtype=base), seed_step(7, 0)

    def generate(config: RolloutConfig) -> Rollout:
        return make_generate(policy, drafter, config, mesh)(params, PROMPTS, run)

    traced = generate(CONFIG)
    assert_same(generate(replace(CONFIG, environment=HostSums(RULE, PROMPTS))), traced, "sampled", "ending")
    assert jnp.sum(traced.lengths) > jnp.sum(traced.written)
    at_once = replace(CONFIG, environment=Sums(training.VOCAB, ends=True), turn_tokens=None)
    assert_same(generate(at_once), generate(replace(at_once, environment=None)), "stopped")


@pytest.mark.slow
@pytest.mark.parametrize("host", [False, True])
def test_routes_of_observed_tokens_are_those_of_a_forward(host: bool):
    config = replace(CONFIG, environment=HostSums(RULE, PROMPTS) if host else RULE)
    generate = make_generate(test_mixture.POLICY, test_mixture.EAGLE3, config, training.mesh_of())
    params = test_mixture.params_on(test_mixture.ONE)
    rollout = generate(params, PROMPTS, test_mixture.RUN)
    rows = join_completions(PROMPTS, rollout, jnp.zeros(len(rollout.lengths)))
    forward = jax.jit(test_mixture.POLICY.apply)(params.policy, rows.tokens, jnp.zeros(len(rows.tokens), jnp.int32))
    seen = np.arange(rows.tokens.shape[1])[None] < np.asarray(rows.lengths)[:, None] - 1
    np.testing.assert_array_equal(np.asarray(rows.routes)[seen], np.asarray(forward.routing.chosen)[seen])
    assert jnp.sum(rollout.lengths) > jnp.sum(rollout.written)

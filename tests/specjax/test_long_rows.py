"""A whole step at the lengths of `qwen3_8b_rl_think`, with a tiny network."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launch.cli.recipes import load_recipe
from models.config import DecoderConfig
from models.decoder import init_decoder, make_policy
from models.drafts.eagle3 import eagle3_like, init_eagle3, make_eagle3
from models.params import init_params
from specjax.rollout.generate import place
from specjax.rollout.plan import RolloutConfig
from specjax.train.state import init_train_state
from specjax.train.train_step import make_train_step
from specjax.types import Params, Prompts
from tests.specjax.training import AS_SHIPPED, CONFIG, VOCAB, count_fives, mesh_of

GROUPS, SAMPLES = 3, 4
SIZE = dict(hidden_size=8, intermediate_size=8, num_heads=1, num_kv_heads=1, head_dim=8, vocab_size=VOCAB)
DECODER = DecoderConfig(**SIZE, num_layers=1, feature_layers=(0,))
HEAD = eagle3_like(DECODER, VOCAB)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_step_of_rows_of_twenty_thousand_tokens() -> None:
    """Twelve rows; no stop token ends one early. The rollout and training give the same log-probs."""
    recipe = load_recipe("qwen3_8b_rl_think")
    budget, width = recipe.rollout.max_new_tokens, recipe.data.max_prompt_tokens
    assert (width, budget) == (2048, 18_432)
    rows, full = GROUPS * SAMPLES, width + budget
    phases = ((rows, full // 4), (rows, full // 2), (rows, full))
    config = replace(
        CONFIG,
        rollout=RolloutConfig(group_size=SAMPLES, max_new_tokens=budget, draft_length=1, phases=phases),
        microbatches=rows,
        ladder=recipe.ladder,
        logit_chunk=2048,
    )
    rng = np.random.default_rng(0)
    prompts = Prompts(
        tokens=jnp.asarray(rng.integers(4, VOCAB, (GROUPS, width)), jnp.int32),
        lengths=jnp.asarray([width, 100, 1000], jnp.int32),
        id=jnp.arange(GROUPS, dtype=jnp.int32),
    )
    mesh, policy = mesh_of(1), make_policy(DECODER)
    inits = partial(init_decoder, DECODER), partial(init_eagle3, HEAD)
    params = Params(*(init_params(init, jax.random.key(i), mesh) for i, init in enumerate(inits)))
    step = make_train_step(policy, make_eagle3(HEAD, policy, unroll=2), count_fives, config, mesh)
    state = init_train_state(params, config, mesh)
    # With the flags of tests, which compile sooner, the step takes several times as long.
    compiled = step.lower(state, prompts).compile(AS_SHIPPED)
    state, rollout, metrics = compiled(state, place(prompts, mesh))
    np.testing.assert_array_equal(rollout.lengths, np.full(rows, budget))
    assert state.step == 1 and all(np.isfinite(x) for x in metrics.values())
    assert metrics["rollout/logprob_gap_mean"] < 1e-4 and metrics["grad_norm/draft"] > 0
    assert int(metrics["rollout/rounds"]) < 0.8 * budget

"""MTP heads have their own loss on the detached outputs of the policy, so training them does not affect the policy."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from models.decoder import init_decoder, make_policy
from models.drafts.mtp import init_mtp, make_mtp, mtp_config
from models.params import init_params
from specjax.drafters import HeadDrafter
from specjax.rollout.generate import place
from specjax.train.batch import TrainBatch
from specjax.train.gradients import accumulate
from specjax.train.loss_context import LossContext
from specjax.train.optimizer import OptimizerConfig
from specjax.train.state import init_train_state
from specjax.train.train_step import make_train_step
from specjax.types import Params
from tests.specjax.training import (
    AS_SHIPPED,
    CONFIG,
    DECODER,
    assert_same_bits,
    count_fives,
    make_prompts,
    mesh_of,
    ragged_batch,
)

MESH = mesh_of(1, 1, 1)
TIED = replace(DECODER, feature_layers=(), tie_embeddings=True)
POLICY = make_policy(TIED)
ROWS, LENGTH = 4, 9


def head(convention: str, unroll: int = 2) -> tuple[HeadDrafter, Params]:
    config = mtp_config(TIED, convention)
    keys = jax.random.split(jax.random.key(1))
    return make_mtp(config, POLICY, unroll), Params(
        init_params(partial(init_decoder, TIED), keys[0], MESH), init_params(partial(init_mtp, config), keys[1], MESH)
    )


@pytest.fixture(scope="module")
def batch() -> TrainBatch:
    return ragged_batch(ROWS, LENGTH)


@pytest.mark.slow
def test_training_the_head_leaves_every_bit_of_the_policys_gradient(batch: TrainBatch):
    drafter, params = head("qwen3_next")

    context = LossContext(POLICY, drafter, CONFIG.rollout.law)
    (on, _), (off, sums) = (
        jax.jit(partial(accumulate, replace(context, train_draft=train)), compiler_options=AS_SHIPPED)(params, batch)
        for train in (True, False)
    )
    assert_same_bits(off.policy, on.policy)
    assert any(np.asarray(x).any() for x in jax.tree.leaves(on.policy))
    assert any(np.asarray(x).any() for x in jax.tree.leaves(on.draft))
    assert all(not np.asarray(x).any() for x in jax.tree.leaves(off.draft))
    assert sums.draft.loss > 0


@pytest.mark.slow
def test_training_steps_lower_the_draft_loss_and_raise_what_is_accepted():
    """The head starts from random weights, and the policy hardly changes."""
    drafter, params = head("mimo", unroll=1)
    options = dict(
        policy_optimizer=OptimizerConfig(learning_rate=1e-5), draft_optimizer=OptimizerConfig(learning_rate=0.03)
    )
    config = replace(CONFIG, **options, rollout=replace(CONFIG.rollout, max_new_tokens=8))
    state, prompts = init_train_state(params, config, MESH), place(make_prompts(), MESH)
    step = make_train_step(POLICY, drafter, count_fives, config, MESH).lower(state, prompts).compile()
    seen = []
    for _ in range(12):
        state, _, metrics = step(state, prompts)
        seen.append([float(metrics[name]) for name in ("loss/draft", "draft/predicted_acceptance")])
    first, last = np.mean(seen[:3], axis=0), np.mean(seen[-3:], axis=0)
    assert last[0] < 0.95 * first[0]
    assert last[1] > first[1] + 0.05

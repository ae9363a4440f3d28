"""Training on rollouts with an environment: what was observed trains nothing, and what the host saw is what trains."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.train.advantage import token_advantages
from specjax.train.draft.schedule import DraftTrainingConfig
from specjax.train.gradients import loss_inputs
from specjax.train.loss import LossConfig, per_token_loss, policy_loss, token_weights
from specjax.train.state import init_train_state
from specjax.train.train_step import StepResult, make_train_step
from specjax.types import Ending, Reward, Rollout
from tests.specjax import training
from tests.specjax.sums import HostSums, Sums

RULE = Sums(training.VOCAB)
PROMPTS = training.make_prompts()
ROLLOUT = replace(
    training.CONFIG.rollout, stop_tokens=(3, 7, 11), environment=RULE, turns=4, turn_tokens=8, verifier="coupled"
)
CONFIG = replace(training.CONFIG, rollout=ROLLOUT, draft_training=DraftTrainingConfig(anchors=6, replay=1))


def take_step(environment: object) -> StepResult:
    """Return the result of a step as numpy."""
    policy, drafter = training.networks()
    config = replace(CONFIG, rollout=replace(ROLLOUT, environment=environment))
    mesh = training.mesh_of(2)
    state = init_train_state(training.params_on(mesh), config, mesh, prompts=PROMPTS.tokens.shape)
    step = make_train_step(policy, drafter, training.count_fives, config, mesh)
    step.start_compiling(state, PROMPTS)
    return jax.device_get(step(state, PROMPTS))


@pytest.fixture(scope="module")
def environment() -> HostSums:
    return HostSums(RULE, PROMPTS)


@pytest.fixture(scope="module")
def result(environment: HostSums) -> StepResult:
    return take_step(environment)


def test_the_step_trains_on_sampled_tokens_of_rows_that_did_not_fail(result: StepResult):
    _, rollout, metrics = result
    batch, reward = rollout.batch, rollout.reward
    assert batch is not None and reward is not None and rollout.sampled is not None
    failed = np.asarray(rollout.ending) == Ending.FAILED
    assert 0 < np.sum(failed) < len(failed) and metrics["rollout/failed"] == np.sum(failed)
    check_reward(rollout, reward)
    starts = np.repeat(np.asarray(PROMPTS.lengths), training.GROUP)
    for row, start in enumerate(starts):
        written = slice(start, start + training.BUDGET)
        np.testing.assert_array_equal(batch.completion[row, written], rollout.sampled[row])
        np.testing.assert_array_equal(batch.tokens[row, written], rollout.tokens[row])
    assert not np.asarray(batch.advantage)[~(batch.completion & batch.counted[:, None])].any()
    observed = int(np.sum(rollout.lengths)) - int(np.sum(rollout.sampled))
    assert metrics["rollout/observed_tokens"] == observed > 0
    assert metrics["rollout/tokens"] == np.sum(rollout.sampled)
    assert metrics["rollout/turns"] == np.mean(rollout.turns)
    assert {"time/tools", "time/waiting", "time/decoding"} <= metrics.keys()


def check_reward(rollout: Rollout, reward: Reward) -> None:
    """Verify that the reward is the one of `count_fives` and of the environment, or none after a failure."""
    failed = np.asarray(rollout.ending) == Ending.FAILED
    np.testing.assert_array_equal(np.isnan(reward.value), failed)
    fives = np.sum(np.asarray(rollout.tokens) == 5, axis=1)
    np.testing.assert_array_equal(np.asarray(reward.value)[~failed], (fives + np.asarray(rollout.returns))[~failed])


def test_the_turns_that_the_host_saw_are_those_that_train(result: StepResult, environment: HostSums):
    _, rollout, _ = result
    assert rollout.sampled is not None and rollout.batch is not None
    seen = {problem: [] for problem in PROMPTS.id.tolist()}
    for (problem, _), turns in environment.turns.items():
        seen[problem].append(turns)
    starts = np.repeat(np.asarray(PROMPTS.lengths), training.GROUP)
    trained = {problem: [] for problem in seen}
    for row, sampled in enumerate(np.asarray(rollout.sampled)):
        ids = np.asarray(rollout.batch.tokens)[row, starts[row] :]
        turns, turn = [], []
        for token, own in zip(ids[: len(sampled)].tolist(), sampled, strict=True):
            turn += [token] if own else []
            if own and token in ROLLOUT.stop_tokens:
                turns, turn = [*turns, turn], []
        trained[int(PROMPTS.id[row // training.GROUP])].append(turns)
    assert {problem: sorted(each) for problem, each in seen.items()} == {
        problem: sorted(each) for problem, each in trained.items()
    }


def test_replay_keeps_what_was_sampled(result: StepResult):
    state, rollout, _ = result
    assert state.adaptation is not None and state.adaptation.replay is not None and rollout.batch is not None
    rows = state.adaptation.replay.rows()
    np.testing.assert_array_equal(rows.completion[0], rollout.batch.completion)
    np.testing.assert_array_equal(rows.tokens[0], rollout.batch.tokens)


def test_log_probs_of_observed_tokens_have_no_gradient():
    batch = training.ragged_batch(6, 16)
    column = jnp.arange(16)[None]
    sampled = batch.completion & (column % 3 != 0)
    batch = replace(batch, completion=sampled, advantage=jnp.where(batch.counted[:, None], batch.advantage, 0.0))
    config = LossConfig(kl_coefficient=0.1)
    place = jnp.broadcast_to(jnp.arange(16, dtype=jnp.int32)[None], (6, 16))

    def loss(theta: jax.Array, mu: jax.Array) -> jax.Array:
        inputs = loss_inputs(theta, replace(batch, mu=mu, old=mu - 0.1, reference=mu - 0.2), place)
        weights = token_weights(batch.trained, config.aggregate, 12)
        return jnp.sum(per_token_loss(policy_loss, inputs, config).loss * weights)

    assert batch.mu is not None
    theta = batch.mu + 0.05
    gradient = jax.grad(loss)(theta, batch.mu)
    assert not np.asarray(gradient)[~np.asarray(batch.trained)].any()
    assert np.asarray(gradient)[np.asarray(batch.trained)].all()
    np.testing.assert_array_equal(loss(theta, batch.mu), loss(theta, jnp.where(sampled, batch.mu, -7.0)))


def test_costs_pass_through_observed_tokens():
    mask, cost = jnp.array([[True, False, True], [True, True, True]]), jnp.array([[1.0, 9.0, 2.0], [0.5, 0.25, 0.0]])
    got = np.asarray(token_advantages(jnp.array([4.0, 2.0]), cost, mask))
    # Returns 4 - 1 - 2, 4 - 2 and 2 - .75, 2 - .25, 2.
    returns = np.array([[1.0, np.nan, 2.0], [1.25, 1.75, 2.0]])
    expected = (returns - np.nanmean(returns)) / np.nanstd(returns)
    np.testing.assert_allclose(got, np.nan_to_num(expected), rtol=1e-5)


def test_an_environment_in_jax_gives_the_same_step(result: StepResult):
    _, rollout, metrics = take_step(RULE)
    _, expected, other = result
    for name in ("tokens", "sampled", "ending", "turns", "full"):
        np.testing.assert_array_equal(getattr(rollout, name), getattr(expected, name), err_msg=name)
    for name in ("loss/policy", "reward/mean", "rollout/turns", "grad_norm/policy", "loss/draft"):
        np.testing.assert_allclose(metrics[name], other[name], rtol=1e-5, err_msg=name)

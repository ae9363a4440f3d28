import re
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafters import NoDrafter
from specjax.rollout.generate import place
from specjax.rollout.speculative import speculative_rollout
from specjax.train.advantage import AdvantageConfig
from specjax.train.batch import ScoredSequences
from specjax.train.config import TrainConfig
from specjax.train.loss import LossConfig
from specjax.train.optimizer import OptimizerConfig
from specjax.train.selection import SelectionConfig
from specjax.train.stages import LogProbs, Stages
from specjax.train.state import init_train_state
from specjax.train.train_step import StepResult, TrainStep, make_train_step
from specjax.train.updates import UpdateConfig
from specjax.types import Prompts, Rollout, TrainState
from tests.refusals import refuses
from tests.specjax import training
from tests.specjax.training import CONFIG, GROUP, count_fives, host_copy, is_adam, make_prompts, params_on, state_on

POLICY, DRAFTER = training.networks()
MESH = training.mesh_of(1, 1, 1)
FROZEN = replace(CONFIG, draft_training=replace(CONFIG.draft_training, mode="frozen"))


def compiled(step: TrainStep, state: TrainState) -> Callable[[TrainState, Prompts], StepResult]:
    program = step.lower(state, make_prompts()).compile()
    return lambda state, prompts: program(state, place(prompts, MESH))


@pytest.fixture(scope="module")
def step() -> TrainStep:
    """Return a step that fails if it is traced twice."""
    rollout_fn = training.traced_once(speculative_rollout)
    return make_train_step(POLICY, DRAFTER, count_fives, CONFIG, MESH, rollout_fn)


@pytest.fixture(scope="module")
def first(step) -> tuple[TrainState, Rollout, dict]:
    return host_copy(step(state_on(MESH), make_prompts()))


def test_steps_trace_once_count_up_and_donate_and_seed_and_step_decide_every_bit(step, first) -> None:
    """The same step number reproduces every bit. Another one gives other tokens with the same parameters."""
    state, seen, layout = state_on(MESH), [], jax.tree.map(lambda x: x.sharding, state_on(MESH))
    for done in range(3):
        assert state.step == done
        with jax.no_tracing():
            before, (state, rollout, metrics) = state, step(state, make_prompts())
        assert all(x.is_deleted() for x in jax.tree.leaves(before))
        assert [x.sharding for x in jax.tree.leaves(state)] == jax.tree.leaves(layout)
        if not done:
            training.assert_same_bits(host_copy((state, rollout, metrics)), first)
        seen.append(np.asarray(rollout.tokens).tobytes())
        assert all(np.isfinite(x) for x in metrics.values())
    assert state.step == 3 and len(set(seen)) == 3
    later = replace(state_on(MESH), step=jax.device_put(jnp.int32(5), layout.step))
    assert (np.asarray(step(later, make_prompts())[1].tokens) != first[1].tokens).any()


def test_a_profile_shows_the_stages_and_their_parts_by_name(step, first) -> None:
    text = step.lower(state_on(MESH), make_prompts()).as_text(debug_info=True)
    rounds, updates = ("prefill", "draft", "verify", "commit"), ("policy_gradient", "draft_gradient", "optimizer")
    for name in ("generate", *rounds, "reward", "update", *updates):
        assert re.search(rf'loc\("([^"]*[/(])?{name}[)/]', text), name


def test_both_networks_learn_and_all_metrics_are_returned(first) -> None:
    state, rollout, metrics = first
    start = host_copy(params_on(MESH))
    assert training.relative_gap(state.params.policy, start.policy) > 1e-4
    assert training.relative_gap(state.params.draft, start.draft) > 1e-4
    assert metrics.keys() == {
        *("reward/mean", "reward/std", "reward/accuracy", "reward/failed", "reward/overlong"),
        *("groups/zero_variance", "groups/sequences_trained", "update/skipped", "update/empty", "draft/skipped"),
        "rollout/empty",
        *("loss/policy", "loss/draft", "loss/clip_fraction", "ratio/mean", "ratio/max", "entropy"),
        *("grad_norm/policy", "grad_norm/draft", "draft/predicted_acceptance", "draft/trained"),
        *("learning_rate/policy", "learning_rate/draft"),
        *("draft/promised_acceptance", "draft/measured_acceptance", "draft/alarm"),
        *("rollout/tokens", "rollout/rounds", "rollout/length_mean", "rollout/length_max", "rollout/truncated"),
        *("rollout/draft_length", "rollout/acceptance_length", "rollout/acceptance_rate_pos_1"),
        *("rollout/acceptance_rate_pos_2", "rollout/logprob_gap_mean", "rollout/logprob_gap_max"),
        *("rollout/sequence_logprob_gap_mean", "rollout/sequence_logprob_gap_max"),
        *("rollout/logprob_alarm", "groups/sequences_with_advantage"),
    }
    assert all(x.shape == () for x in metrics.values())
    assert metrics["reward/mean"] == np.mean(np.sum(rollout.tokens == 5, axis=1))
    assert np.array_equal(rollout.reward.value, np.sum(rollout.tokens == 5, axis=1))
    assert metrics["rollout/logprob_gap_max"] < 1e-4 and abs(metrics["ratio/mean"] - 1) < 1e-5
    # Acceptance at position 1 and the mean of sum(min(p, q)) over the batch estimate the same number.
    assert abs(metrics["rollout/acceptance_rate_pos_1"] - metrics["draft/predicted_acceptance"]) < 0.1
    assert metrics["draft/alarm"] == 0


def test_the_stop_token_is_trained(first) -> None:
    """A policy whose stop tokens are left out of the loss forgets to stop."""
    _, rollout, _ = first
    stopped, batch = np.flatnonzero(rollout.stopped), jax.tree.map(jnp.asarray, rollout.batch)
    assert len(stopped) and not rollout.stopped.all()
    starts = np.repeat(make_prompts().lengths, GROUP)
    last = starts + rollout.lengths - 1
    rows = np.arange(len(last))
    np.testing.assert_array_equal(batch.tokens[stopped, last[stopped]], training.STOP)
    assert batch.trained[rows, last].all() and not batch.trained[stopped, last[stopped] + 1].any()


@pytest.mark.slow
def test_draft_training_does_not_change_the_policy_and_a_frozen_draft_stays() -> None:
    def stepped(config: TrainConfig) -> StepResult:
        state = state_on(MESH, config)
        step = make_train_step(POLICY, DRAFTER, count_fives, config, MESH).lower(state, make_prompts())
        return step.compile(training.AS_SHIPPED)(state, place(make_prompts(), MESH))

    (online, rollout, metrics), (frozen, same, fewer) = stepped(CONFIG), stepped(FROZEN)
    off, on = (training.last_gradients(state).policy for state in (frozen, online))
    training.assert_same_bits((same.tokens, off), (rollout.tokens, on))
    training.assert_same_bits(frozen.params, replace(online.params, draft=params_on(MESH).draft))
    assert metrics.keys() - fewer.keys() == {"grad_norm/draft", "draft/skipped", "draft/trained"}
    # A frozen draft's predicted acceptance is compared with the measured one too.
    for name in ("loss/draft", "draft/predicted_acceptance"):
        np.testing.assert_allclose(fewer[name], metrics[name], rtol=1e-6, err_msg=name)


def test_without_a_drafter_and_with_a_reference_policy() -> None:
    config = replace(CONFIG, rollout=replace(CONFIG.rollout, draft_length=0), loss=LossConfig(kl_coefficient=0.1))
    state = init_train_state(replace(params_on(MESH), draft={}), config, MESH, with_reference=True)
    bare = compiled(make_train_step(POLICY, NoDrafter(), count_fives, config, MESH), state)
    reference, divergence = host_copy(state.reference), []
    for _ in range(2):
        state, rollout, metrics = bare(state, make_prompts())
        divergence.append(float(metrics["kl/reference"]))
    assert divergence[0] < 1e-10 and divergence[1] > 1e-5
    training.assert_same_bits(state.reference, reference)
    assert metrics["rollout/acceptance_length"] == 1 and rollout.accepted.shape == (8 * GROUP, 0)
    assert not metrics.keys() & {"loss/draft", "grad_norm/draft", "draft/predicted_acceptance"}


def test_a_rollout_of_another_group_size_is_refused() -> None:
    stages = Stages(POLICY, DRAFTER, count_fives, CONFIG, MESH)
    few = Rollout(jnp.zeros((8, 3), jnp.int32), jnp.ones(8, jnp.int32))
    with refuses(f"...8...8...group_size = {GROUP}"):
        stages.reward(few, make_prompts())


def scored(tokens: jax.Array, completion: jax.Array, reward: jax.Array, mu: jax.Array) -> ScoredSequences:
    return ScoredSequences(tokens, completion, reward=reward, counted=jnp.isfinite(reward), mu=mu)


def test_old_is_the_generating_policy_or_the_one_before_the_updates() -> None:
    tokens = jnp.tile(jnp.arange(8, dtype=jnp.int32) % 5 + 1, (8, 1))
    completion = jnp.broadcast_to(jnp.arange(8) >= 3, tokens.shape)
    mu = jnp.where(completion, -9.0, 0.0)
    with jax.set_mesh(MESH):
        state, sequences = state_on(MESH, CONFIG), scored(tokens, completion, jnp.zeros(len(tokens)), mu)

        def anchor(updates: UpdateConfig) -> jax.Array | None:
            stages = Stages(POLICY, DRAFTER, count_fives, replace(CONFIG, updates=updates), MESH)
            return jax.jit(stages.logprob)(state, sequences).old

        assert anchor(UpdateConfig()) is None
        np.testing.assert_array_equal(anchor(UpdateConfig(epochs=2)), mu)
        recomputed = anchor(UpdateConfig(epochs=2, recompute_old=True))
        logits = jax.jit(POLICY.apply)(state.params.policy, tokens, np.zeros(len(tokens), np.int32)).logits
    law = jax.nn.log_softmax(logits[:, :-1])
    expected = jnp.take_along_axis(law, tokens[:, 1:, None], axis=2)[..., 0]
    np.testing.assert_allclose(recomputed[:, 3:], expected[:, 2:], atol=1e-5)


def test_rewards_pay_for_kl_by_sequence_or_from_each_token_on() -> None:
    """Some tokens of a group have a higher probability under the reference policy."""
    tokens = jnp.tile(jnp.array([1, 2, 3], jnp.int32), (8 * GROUP, 1))
    completion = jnp.broadcast_to(jnp.array([False, True, True]), tokens.shape)
    reward = jnp.arange(8.0 * GROUP) % 3
    log_probs = jnp.array(np.random.default_rng(0).normal(-3.0, 1.0, tokens.shape), jnp.float32)
    # Difference in nats between the log-probs of the generating policy and of the reference.
    sequences = scored(tokens, completion, reward, log_probs + jnp.array([[0.0, 0.5, 1.0]]))

    def advantage(kl_in: Literal["reward", "token"]) -> np.ndarray:
        loss = LossConfig(kl_in=kl_in, kl_coefficient=1.0, kl_estimator="k1")
        config = replace(CONFIG, loss=loss, advantage=AdvantageConfig(baseline="batch", scale="batch"))
        stages = Stages(POLICY, DRAFTER, count_fives, config, MESH)
        return np.asarray(stages.advantage(sequences, LogProbs(None, log_probs)).advantage)

    by_sequence, by_token = advantage("reward"), advantage("token")
    earned = np.asarray(reward, np.float64)
    expected = (earned - earned.mean()) / earned.std()
    np.testing.assert_allclose(by_sequence[:, 1:], np.stack([expected] * 2, axis=1), atol=1e-4)
    returns = np.stack([earned - 1.5, earned - 1.0], axis=1)
    np.testing.assert_allclose(by_token[:, 1:], (returns - returns.mean()) / returns.std(), atol=1e-4)
    assert not by_token[:, 0].any() and not by_sequence[:, 0].any()


@pytest.mark.slow
def test_several_updates_of_selected_groups_with_kl_in_the_reward_and_a_reference_that_follows() -> None:
    """Each step takes four updates from one rollout, and is traced once."""
    slow = OptimizerConfig(learning_rate=1e-3)
    config = replace(
        replace(CONFIG, policy_optimizer=slow, draft_optimizer=slow, microbatches=2, ladder=(9,), reference_every=2),
        selection=SelectionConfig(groups=4, drop_truncated=True, overlong_buffer=2),
        loss=LossConfig(kl_in="reward", kl_coefficient=0.1),
        advantage=AdvantageConfig(scale="none"),
        updates=UpdateConfig(minibatches=2, epochs=2),
    )
    state = init_train_state(params_on(MESH), config, MESH, with_reference=True)
    start = host_copy(state.reference)
    run = compiled(make_train_step(POLICY, DRAFTER, count_fives, config, MESH), state)
    state, rollout, metrics = run(state, make_prompts())
    training.assert_same_bits(state.reference, start)
    assert 0 < metrics["groups/sequences_trained"] <= min(4 * GROUP, np.sum(rollout.stopped))
    assert metrics["rollout/logprob_gap_max"] < 1e-4 and metrics["ratio/max"] > 1.0001
    before = host_copy(state.params.policy)
    assert training.relative_gap(before, start) > 1e-4
    state, _, metrics = run(state, make_prompts())
    training.assert_same_bits(state.reference, state.params.policy)
    assert metrics["kl/reference"] > 1e-6 and metrics["update/skipped"] == 0
    counts = [x.count for x in jax.tree.leaves(state.optimizer, is_leaf=is_adam) if is_adam(x)]
    assert len(counts) == 2 and all(count == 8 for count in counts)


@pytest.mark.slow
def test_draft_lengths_follow_acceptance_and_costs_without_another_trace() -> None:
    """At first nothing is known, so nothing is drafted. Then the loss predicts enough acceptance for cheap rounds."""
    options = replace(CONFIG.rollout, draft_lengths=(0, 1, 2), phases=((8 * GROUP, 100), (4, 100)))
    config = replace(CONFIG, rollout=options)
    cheap, dear = np.array([[1, 0.94, 9], [1, 9, 0.94]], np.float32), np.array([[1, 9, 9]] * 2, np.float32)
    rollout_fn = training.traced_once(speculative_rollout)
    stepped = make_train_step(POLICY, DRAFTER, count_fives, config, MESH, rollout_fn)
    state, used = init_train_state(params_on(MESH), config, MESH, seconds=cheap), []
    for seconds in (cheap, cheap, dear):
        assert state.drafting is not None
        costs = jax.device_put(jnp.asarray(seconds), state.drafting.seconds.sharding)
        state = replace(state, drafting=replace(state.drafting, seconds=costs))
        state, rollout, metrics = stepped(state, make_prompts())
        used.append(np.asarray(rollout.draft_length)[0].tolist())
        assert (np.asarray(rollout.drafted).sum() > 0) == any(used[-1])
    assert used == [[0, 0], [1, 2], [0, 0]]
    assert state.drafting is not None and state.drafting.acceptance.drafted[0] > 0
    assert state.drafting.acceptance.predicted == metrics["draft/predicted_acceptance"]
    # All rows end together at draft length 0, so the second phase has no rounds.
    ran = np.asarray(state.drafting.progress.trips) > 0
    assert ran[0, 0] and ran[0, 1] and ran[1, 2]
    assert not ran[0, 2] and not ran[1, 1]
    with refuses("draft_lengths = (0, 1, 2):"):
        init_train_state(params_on(MESH), config, MESH)


@pytest.mark.slow
def test_bfloat16_compute_keeps_float32_masters() -> None:
    step = make_train_step(*training.networks("bfloat16"), count_fives, replace(CONFIG, microbatches=2), MESH)
    run = compiled(step, state_on(MESH))
    state, rollout, metrics = run(state_on(MESH), make_prompts())
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    assert rollout.full.dtype == jnp.float32
    assert all(np.isfinite(x) for x in metrics.values())
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))
    assert training.relative_gap(state.params.policy, host_copy(params_on(MESH).policy)) > 1e-4
    assert metrics["rollout/logprob_gap_mean"] < 0.05


@pytest.mark.parametrize(
    ("changes", "shape", "prompts", "message"),
    [
        (dict(), (8, 1, 1), 12, "prompts = 12:...8"),
        (dict(microbatches=8), (8, 1, 1), 8, "minibatches x microbatches = 8:...4"),
        (dict(loss=LossConfig(kl_coefficient=0.1)), (1, 1, 1), 8, "kl_coefficient = 0.1:"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict, shape: tuple, prompts: int, message: str) -> None:
    mesh = training.mesh_of(*shape)
    step = make_train_step(POLICY, DRAFTER, count_fives, replace(CONFIG, **changes), mesh)
    with refuses(message):
        step.lower(state_on(mesh), make_prompts(prompts))


def only_required(policy, drafter, params, prompts, seed_step, config):
    """Rollout function that leaves out every field that may be absent."""
    rollout = speculative_rollout(policy, drafter, params, prompts, seed_step, config)
    return Rollout(rollout.tokens, rollout.lengths)


def test_a_rollout_of_only_tokens_and_lengths_is_trained_on() -> None:
    forked = make_train_step(POLICY, DRAFTER, count_fives, CONFIG, MESH, only_required)
    _, rollout, metrics = forked.lower(state_on(MESH), make_prompts()).out_info
    assert all(getattr(rollout, name) is None for name in ("law", "full", "stopped", "drafted", "row_rounds"))
    of_rollout = {"rollout/tokens", "rollout/length_mean", "rollout/length_max"}
    assert {name for name in metrics if name.startswith(("rollout/", "ratio/"))} == of_rollout
    assert {"grad_norm/policy", "loss/policy"} <= set(metrics)

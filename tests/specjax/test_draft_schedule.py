"""The draft is trained in exactly the right steps, on exactly the right rollouts."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.rollout.generate import place
from specjax.rollout.speculative import speculative_rollout
from specjax.train.batch import ScoredSequences
from specjax.train.draft.loss import DraftSums
from specjax.train.draft.schedule import (
    DraftTrainingConfig,
    DraftTrainingState,
    draft_is_due,
    init_draft_training,
    unused_draft_is_due,
    update_schedule,
)
from specjax.train.state import init_train_state
from specjax.train.train_step import StepResult, make_train_step
from specjax.types import Params, PyTree, TrainState
from tests.refusals import refuses
from tests.specjax import training
from tests.specjax.training import GROUP, assert_same_bits, host_copy, last_gradients, make_prompts, relative_gap

POLICY, DRAFTER = training.networks()
MESH = training.mesh_of(2, 1, 1)
DRAFT_TRAINING = DraftTrainingConfig(anchors=0, every=3, max_every=3, fall=0.5, replay=2)
ADAPTIVE = replace(training.CONFIG, draft_training=DRAFT_TRAINING, microbatches=2, ladder=(12,))
LAW = training.CONFIG.rollout.law


def fresh() -> TrainState:
    prompts = make_prompts().tokens.shape
    return init_train_state(training.params_on(MESH), ADAPTIVE, MESH, prompts=(prompts[0], prompts[1]))


@pytest.fixture(scope="module")
def step() -> Callable[[TrainState], StepResult]:
    """Return the step; all kinds of steps are one program."""
    rollout_fn = training.traced_once(speculative_rollout)
    made = make_train_step(POLICY, DRAFTER, training.count_fives, ADAPTIVE, MESH, rollout_fn)
    program = made.lower(fresh(), make_prompts()).compile()
    return lambda state: program(state, place(make_prompts(), MESH))


@pytest.fixture(scope="module")
def run(step) -> list[StepResult]:
    """Return the initial state, then each of five steps with the state after it."""
    state, seen = fresh(), []
    seen.append((host_copy(state), None, None))
    for _ in range(5):
        state, rollout, metrics = step(state)
        seen.append(host_copy((state, rollout, metrics)))
    return seen


def same(tree: PyTree, other: PyTree) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True))


def test_the_draft_is_trained_in_every_third_step_and_the_policy_in_all(run) -> None:
    for number, ((before, *_), (after, _, metrics)) in enumerate(zip(run, run[1:], strict=False)):
        trained = number % 3 == 0
        assert same(after.params.draft, before.params.draft) is not trained, number
        assert same(after.optimizer.draft, before.optimizer.draft) is not trained, number
        assert not same(after.params.policy, before.params.policy), number
        assert np.isfinite(metrics["grad_norm/draft"]) == trained, number
        assert np.isfinite(metrics["loss/draft"]) == np.isfinite(metrics["draft/predicted_acceptance"]) == trained
        assert metrics["draft/trained"] == trained and metrics["draft/alarm"] == 0


def test_only_the_last_rollouts_are_kept(run) -> None:
    prompts, (state, *_) = make_prompts(), run[5]
    replay = state.adaptation.replay
    for number in (3, 4):
        rollout, at, expected = run[number + 1][1], number % 2, []
        for row in range(8 * GROUP):
            prompt, begin = prompts.tokens[row // GROUP], int(prompts.lengths[row // GROUP])
            completion = rollout.tokens[row, : int(rollout.lengths[row])].tolist()
            expected.append([begin, begin + len(completion), *prompt[:begin].tolist(), *completion])
        spans = zip(replay.start[at].tolist(), replay.end[at].tolist(), replay.tokens[at].tolist(), strict=True)
        assert sorted([begin, end, *tokens[:end]] for begin, end, tokens in spans) == sorted(expected)


@jax.jit
def draft_gradient(params: Params, tokens: np.ndarray, completion: np.ndarray) -> tuple[jax.Array, PyTree]:
    """Return the drafter's own loss over all these rows at once, and its gradient."""
    output = POLICY.apply(params.policy, tokens, jnp.zeros(len(tokens), jnp.int32))

    def loss(draft: PyTree) -> jax.Array:
        both = replace(params, draft=draft)
        return DRAFTER.loss(both, tokens, output, completion, LAW).loss / jnp.sum(completion, dtype=jnp.float32)

    return jax.value_and_grad(loss)(params.draft)


def test_a_training_step_learns_from_this_rollout_and_those_kept_by_the_policy_as_it_is(run) -> None:
    """Microbatches have their own windows. The logged loss is only of this rollout."""
    before, (after, _, metrics) = run[3][0], run[4]
    # Step 3 trained on the rollouts kept before it and on its own, which then replaced the oldest.
    old, new = before.adaptation.replay, after.adaptation.replay
    tokens, start, end = (
        np.concatenate([*getattr(old, name), getattr(new, name)[3 % 2]]) for name in ("tokens", "start", "end")
    )
    column = np.arange(tokens.shape[1])[None]
    completion = (column >= start[:, None]) & (column < end[:, None])
    assert completion.reshape(3, -1).any(axis=1).all()
    _, expected = draft_gradient(before.params, tokens, completion)
    assert relative_gap(last_gradients(after).draft, expected) < 1e-5
    own_rows = (np.arange(len(tokens)) >= 2 * 8 * GROUP)[:, None]
    loss, newest = draft_gradient(before.params, tokens, completion & own_rows)
    assert relative_gap(last_gradients(after).draft, newest) > 1e-2
    np.testing.assert_allclose(metrics["loss/draft"], loss, rtol=1e-5)
    # Nothing had been kept when the first step trained.
    first, tokens, completion = run[1][0], tokens.copy(), completion.copy()
    kept = first.adaptation.replay
    tokens[: 8 * GROUP], completion[8 * GROUP :] = kept.tokens[0], False
    completion[: 8 * GROUP] = (column >= kept.start[0][:, None]) & (column < kept.end[0][:, None])
    assert relative_gap(last_gradients(first).draft, draft_gradient(run[0][0].params, tokens, completion)[1]) < 1e-5


def test_a_fall_of_acceptance_triggers_training_and_does_not_change_the_policy(step, run) -> None:
    """A step that does not train is run again with a higher best acceptance, below which it then lies."""

    def placed(best: float) -> TrainState:
        state = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), run[1][0], fresh())
        return replace(
            state,
            adaptation=replace(
                state.adaptation, best=jax.device_put(jnp.float32(best), state.adaptation.best.sharding)
            ),
        )

    rollout, metrics = run[2][1:]
    rate, drafted = float(metrics["rollout/acceptance_rate_pos_1"]), rollout.drafted[:, 0].sum()
    bests = np.linspace(0, 1, 1001)
    least = bests[0.5 * bests - 2 * np.sqrt(bests * (1 - bests) / drafted) > rate].min()
    rests, fell = (host_copy(step(placed(best))) for best in (least - 0.01, least + 0.01))
    assert same(rests[0].params.draft, run[1][0].params.draft)
    assert not same(fell[0].params.draft, run[1][0].params.draft)
    assert_same_bits(fell[1], rests[1])
    assert_same_bits(fell[0].params.policy, rests[0].params.policy)
    assert_same_bits(last_gradients(fell[0]).policy, last_gradients(rests[0]).policy)
    # Counts of the draft before its training are reset.
    assert fell[0].adaptation.best == 0 < rests[0].adaptation.best


def batch_with(proposed: int, accepted: int) -> ScoredSequences:
    first, second = (jnp.arange(100)[None] < count for count in (proposed, accepted))
    scores = dict(reward=jnp.zeros(1), counted=jnp.ones(1, bool))
    return ScoredSequences(jnp.zeros((1, 100), jnp.int32), first, **scores, proposed=first, accepted=second)


def state_of(step: int, adaptation: DraftTrainingState | None) -> TrainState:
    draft = {"w": jnp.ones(2)}
    return TrainState(jnp.int32(step), Params({}, draft), Params({}, {}), None, None, adaptation)


def sums_of(proposed: int, accepted: int, mean: float, predicted: float = 0.5) -> DraftSums:
    return DraftSums(*map(jnp.float32, (100, 0, 100 * predicted, 10_000, proposed, mean * proposed, accepted)))


def watch(
    counts: list[tuple[int, int, float]], trained: tuple[bool, ...] = ()
) -> list[tuple[DraftTrainingState, dict]]:
    """Return the adaptation after each step with these counts: (proposed, accepted, mean promised)."""
    config = DraftTrainingConfig()
    state, seen = state_of(0, init_draft_training(config, None)), []
    for i, (proposed, accepted, mean) in enumerate(counts):
        now, sums = bool(trained[i : i + 1] == (True,)), sums_of(proposed, accepted, mean)
        state, metrics = update_schedule(config, state, batch_with(proposed, accepted), sums, now)
        seen.append((state.adaptation, metrics))
    return seen


def test_the_best_acceptance_is_a_running_mean_since_the_last_training() -> None:
    seen = watch([(10, 8, 0.8), (10, 4, 0.8), (10, 2, 0.8), (10, 5, 0.8)], (False, False, True))
    np.testing.assert_allclose([x.best for x, _ in seen], [0.8, 0.8, 0, 0.5], rtol=1e-6)
    np.testing.assert_allclose([x.drafted for x, _ in seen], [10, 18, 0, 10], rtol=1e-6)
    np.testing.assert_allclose([x.accepted for x, _ in seen], [8, 10.4, 0, 5], rtol=1e-6)


@pytest.mark.parametrize("accepted, trains", [(55, False), (47, False), (46, True)])
def test_a_step_with_acceptance_far_below_the_best_triggers_training(accepted: int, trains: bool) -> None:
    """The threshold is reduced by two standard deviations of the noise, 8.8 of 100 drafts."""
    best = init_draft_training(DraftTrainingConfig(), None)
    best = replace(best, best=jnp.float32(0.74), interval=jnp.int32(10), wait=jnp.int32(9))
    config = DraftTrainingConfig(every=100, max_every=100, fall=0.25)
    assert bool(draft_is_due(config, state_of(7, best), batch_with(100, accepted))) == trains
    # Acceptance did not fall if nothing was drafted, or if the rollout does not report it.
    assert not draft_is_due(config, state_of(7, best), batch_with(0, 0))
    silent = replace(batch_with(100, 0), proposed=None, accepted=None)
    assert not draft_is_due(config, state_of(7, best), silent)
    assert draft_is_due(config, state_of(7, replace(best, wait=jnp.int32(0))), silent)


def test_training_gets_rarer_while_acceptance_holds_and_returns_when_it_changes() -> None:
    """Predicted acceptance rises for 20 steps, holds, falls slowly from step 200 on, and holds at a lower level.

    In step 190, measured acceptance falls.
    """
    config, trained = DraftTrainingConfig(every=2, max_every=16), []
    state = state_of(0, init_draft_training(config, None))

    @jax.jit
    def step_of(state: TrainState, batch: ScoredSequences, sums: DraftSums) -> tuple[TrainState, bool | jax.Array]:
        due = draft_is_due(config, state, batch)
        return update_schedule(config, state, batch, sums, due)[0], due

    batches = {accepted: batch_with(100, accepted) for accepted in (20, 50)}
    for step in range(1000):
        accepted, predicted = 20 if step == 190 else 50, 0.3 + 0.01 * min(step, 20)
        predicted -= 0.002 * min(max(step - 200, 0), 25)
        state, due = step_of(state, batches[accepted], sums_of(100, accepted, 0.5, predicted))
        trained += [step] * int(due)
    assert set(np.diff([step for step in trained if step <= 20])) == {2}
    intervals = np.diff([step for step in trained if step < 190]).tolist()
    assert intervals == sorted(intervals) and set(intervals) == {2, 4, 8, 16}
    assert [step for step in trained if 190 <= step < 200] == [190, 192, 196]
    # 0.02 below the highest. Later the highest is forgotten, and training is rare again.
    assert set(np.diff([step for step in trained if 260 < step < 320])) == {2}
    assert max(np.diff([step for step in trained if step > 900])) == 16


def test_row_50_an_unused_draft_is_trained_now_and_then_and_again_once_it_is_used() -> None:
    config, trained = DraftTrainingConfig(every=2, max_every=16), []
    state = state_of(0, init_draft_training(config, None))
    for step in range(80):
        batch = batch_with(100, 50) if 60 <= step < 66 else batch_with(0, 0)
        due = draft_is_due(config, state, batch)
        state, _ = update_schedule(config, state, batch, sums_of(100, 50, 0.5), due)
        trained += [step] * int(due)
    # Drafting begins at 60, and ends before the training of 66.
    assert trained == [0, 2, 6, 14, 30, 46, 60, 62, 64, 66, 68, 72]
    assert [step for step in range(60) if unused_draft_is_due(config, step + 1)] == trained[:6]


def test_row_50_at_a_fixed_draft_length_of_0_the_draft_is_unused() -> None:
    config, trained = DraftTrainingConfig(max_every=4), []
    state = state_of(0, init_draft_training(config, None))
    # Such a rollout has no counts of drafts.
    batch = replace(batch_with(0, 0), proposed=None, accepted=None)
    for step in range(16):
        due = draft_is_due(config, state, batch)
        state, _ = update_schedule(config, state, batch, sums_of(0, 0, 0.5), due, may_draft=False)
        trained += [step] * int(due)
    assert trained == [0, 1, 3, 7, 11, 15]


def test_a_loss_of_nan_does_not_change_the_schedule() -> None:
    config = DraftTrainingConfig(every=2, max_every=8)
    state = state_of(0, init_draft_training(config, None))
    for predicted in (0.5, np.nan, 0.5):
        state, _ = update_schedule(config, state, batch_with(100, 50), sums_of(100, 50, 0.5, predicted), due=True)
    assert float(state.adaptation.fast) == 0.5 and int(state.adaptation.interval) == 2


def test_a_fixed_schedule_is_not_traced() -> None:
    always = DraftTrainingConfig(max_every=1)
    state, batch = state_of(0, init_draft_training(always, None)), batch_with(10, 5)
    assert draft_is_due(always, state, batch) is True
    assert draft_is_due(always, replace(state, params=Params({}, {})), batch) is False
    with refuses("draft_training = ...max_every=32"):
        draft_is_due(DraftTrainingConfig(), replace(state, adaptation=None), batch)


def test_the_alarm_needs_successive_steps_and_allows_for_noise() -> None:
    short, well = (100, 55, 0.8), (100, 75, 0.8)
    raised = [int(metrics["draft/alarm"]) for _, metrics in watch([short, short, well, short, short, short, well])]
    assert raised == [0, 0, 0, 0, 0, 1, 0]
    # 0.1 and two standard deviations, 0.08 for 100 drafts and 0.253 for 10: few drafts are weak evidence.
    few = watch([(100, 61, 0.8), (100, 63, 0.8), (10, 4, 0.8), (10, 5, 0.8)])
    assert [int(x.short) for x, _ in few] == [1, 0, 1, 0]
    # If nothing was drafted, the alarm stays as it was.
    seen = watch([short, short, short, (0, 0, 0.0)])
    assert seen[-1][1]["draft/alarm"] == 1 and np.isnan(seen[-1][1]["draft/promised_acceptance"])


def test_replay_needs_the_shape_of_the_prompts() -> None:
    with refuses("replay = 2:"):
        init_train_state(training.params_on(MESH), ADAPTIVE, MESH)

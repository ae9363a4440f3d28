"""Rollouts that end before their last sequences, and the steps that go on with these."""

import itertools
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.asynchronous.step import AsynchronousStep
from specjax.carry_over.groups import Take, carry_over_of, divide_groups, next_prompts, nothing_carried
from specjax.carry_over.rollout import carry_over, carry_over_rollout
from specjax.keys import SeedStep
from specjax.parallel.mesh import MeshConfig, disjoint_mesh
from specjax.rewards import HostReward
from specjax.rollout.generate import Choice, RolloutFn
from specjax.rollout.plan import RolloutConfig
from specjax.rollout.speculative import speculative_rollout
from specjax.testing.exact import completion_law, count_completions, fit
from specjax.train.loss import LossConfig
from specjax.train.selection import SelectionConfig
from specjax.train.stages import Stages
from specjax.train.state import init_train_state
from specjax.train.train_step import make_train_step
from specjax.types import CarryOver, Params, Prompts, PyTree, Reward, Rollout
from tests.specjax.test_split_step import count_fives as count_on_host
from tests.specjax.training import (
    BUDGET,
    CONFIG,
    GROUP,
    count_fives,
    host_copy,
    make_prompts,
    mesh_of,
    networks,
    params_on,
)
from tests.tiny import ENUMERABLE, WANDERING, World


def rollouts(
    world: World,
    drafter: str,
    draft: str,
    config: RolloutConfig,
    steps: int,
    rollout_fn: RolloutFn = carry_over_rollout,
    first: Prompts | None = None,
    later: Prompts | None = None,
) -> list[Rollout]:
    """Return the rollouts of the same prompts, each of which goes on with what the one before left.

    first: the prompts; None: those of the world.
    later: prompts from the second step on. Where their ids differ, they begin in that step.
    """
    first = first or world.batch
    later = later or first

    def generate(params: Params, prompts: Prompts, seed_step: SeedStep, _: Choice) -> Rollout:
        return rollout_fn(world.policy, world.drafters[drafter], params, prompts, seed_step, config)

    @jax.jit
    def run(params: Params, prompts: Prompts, carried: CarryOver, step: jax.Array) -> tuple[Rollout, CarryOver]:
        # The number of updates, as if the networks changed.
        rollout = carry_over(generate, carried, step + 10)(params, prompts, (jnp.int32(5), step), None)
        return rollout, carry_over_of(config, prompts, rollout)

    found, carried = [], nothing_carried(config, first.tokens.shape)
    assert carried is not None
    for step in range(steps):
        prompts = later if step else first
        rollout, carried = run(world.params(draft), prompts, carried, jnp.int32(step))
        # Also those groups that are whole, so that every row has one completion in the end.
        carried = replace(carried, prompts=prompts, kept=jnp.ones_like(carried.kept))
        found.append(jax.tree.map(np.asarray, rollout))
    return found


def test_a_completion_that_several_rollouts_write_has_the_exact_law() -> None:
    """Rows that end early are short. If one of them were drawn again, the law would be another."""
    world, budget, copies = ENUMERABLE, 5, 50_000
    config = RolloutConfig(group_size=2, max_new_tokens=budget, draft_length=2, stop_tokens=world.stops, carry_over=0.2)
    config = replace(config, stop_strings=world.stop_strings)
    repeated = jax.tree.map(lambda x: jnp.repeat(x, copies, axis=0), world.batch)
    parts = rollouts(world, "table", "none", config, 8, first=replace(repeated, id=jnp.arange(copies)))
    assert parts[-1].done.all() and np.unique(parts[-1].versions).size >= 3
    (prompt,) = world.prompts
    cells = completion_law(world.logits, prompt, world.vocab, world.stops, budget, config.law, world.ends)
    result = fit(Counter(count_completions(parts[-1])), cells)
    assert result.passes and result.power > 0.9, result


def test_row_112_a_carried_completion_is_the_one_of_a_single_rollout() -> None:
    """With `coupled` and networks that do not change: token for token that of plain decoding in the step it began."""
    world, group = WANDERING, 3
    plain = RolloutConfig(
        group_size=group, max_new_tokens=12, draft_length=0, stop_tokens=world.stops, verifier="coupled"
    )
    plain = replace(plain, stop_strings=world.stop_strings)
    width, rows = world.batch.tokens.shape[1], len(world.prompts) * group
    # Phases shrink the batch to fewer slots than are left over, and hold longer rows than some that go on.
    drafted = replace(plain, draft_length=2, carry_over=0.6, phases=((rows, 6), (rows, 12), (3, width + 12)))
    # The first prompt has another id from the second step on, and so begins there.
    renewed = replace(world.batch, id=world.batch.id.at[0].add(100))
    parts = rollouts(world, "eagle3", "random", drafted, 4, later=renewed)
    first, second, *_, last = parts
    assert 3 < (~first.done).sum() <= drafted.left_over(rows) == 9 and last.done.sum() > second.done.sum()

    @jax.jit
    def decode(prompts: Prompts, step: jax.Array) -> Rollout:
        drafter = world.drafters["none"]
        return speculative_rollout(world.policy, drafter, world.params("none"), prompts, (jnp.int32(5), step), plain)

    unbroken = [jax.tree.map(np.asarray, decode(*x)) for x in ((world.batch, jnp.int32(0)), (renewed, jnp.int32(1)))]
    fresh, column, before = np.arange(rows) < group, np.arange(12)[None], None
    for step, rollout in enumerate(parts):
        began = (fresh & (step > 0)).astype(np.int32)
        np.testing.assert_array_equal(rollout.began, began)
        reached = column < rollout.lengths[:, None]
        for name, exact in (("tokens", True), ("full", False)):
            expected = np.where(began[:, None], getattr(unbroken[1], name), getattr(unbroken[0], name))
            expected, found = np.where(reached, expected, 0), getattr(rollout, name)
            np.testing.assert_allclose(found, expected, atol=0 if exact else 1e-4, err_msg=name)
        stopped = np.where(began == 1, unbroken[1].stopped, unbroken[0].stopped)
        np.testing.assert_array_equal(rollout.stopped, stopped & rollout.done)
        start = np.zeros(rows) if before is None else np.where(fresh & (step == 1), 0, before.lengths)
        np.testing.assert_array_equal(rollout.resumed_at, start)
        assert (rollout.versions[reached & (column >= start[:, None])] == step + 10).all()
        if before is not None:
            goes_on = ~before.done & (start > 0)
            assert (
                (before.stopped & (start > 0)).any()
                and goes_on.any()
                and (rollout.lengths[goes_on] > start[goes_on]).all()
            )
            # What earlier rollouts wrote is kept, to the bit.
            for name in ("tokens", "law", "full", "writer", "versions"):
                kept, old = (np.where(column < start[:, None], getattr(x, name), 0) for x in (rollout, before))
                np.testing.assert_array_equal(kept, old if step > 1 else np.where(start[:, None] > 0, old, 0))
        before = rollout


# Groups are dropped unless they end within two steps. A gap of other than the newest tokens would raise the alarm.
CARRYING = replace(CONFIG, rollout=replace(CONFIG.rollout, carry_over=0.5, max_age=1), gap_alarm=1e-4)


TRAINED = 4  # of 8 groups


def test_groups_wait_until_they_are_whole_and_train_once_with_the_log_probs_of_their_writers() -> None:
    mesh, (policy, drafter) = mesh_of(2, 1, 1), networks()
    step = make_train_step(policy, drafter, count_fives, CARRYING, mesh)
    state = init_train_state(params_on(mesh), CARRYING, mesh, prompts=make_prompts().tokens.shape)
    supply, column = fresh_prompts(), np.arange(BUDGET)[None]
    taken, trained, dropped, ratios, waited = list[int](), list[int](), list[int](), list[float](), 0

    @jax.jit
    def log_probs(params: PyTree, tokens: jax.Array) -> jax.Array:
        logits = policy.apply(params, tokens, jnp.zeros(len(tokens), jnp.int32)).logits
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=2)
        return jnp.pad(picked[..., 0], ((0, 0), (1, 0)))

    for number in range(6):
        before, weights = host_copy(state.carried), host_copy(state.params.policy)
        prompts = next_prompts(state.carried, supply)
        taken += prompts.id[~before.kept].tolist()
        state, rollout, metrics = step(state, prompts)
        rollout, metrics, kept = host_copy(rollout), host_copy(metrics), host_copy(state.carried.kept)

        # Groups that go on keep their rows and all that was written; samples that had ended are not touched.
        np.testing.assert_array_equal(prompts.id[before.kept], before.prompts.id[before.kept])
        going_on = np.repeat(before.kept, GROUP)
        start = np.where(going_on, before.sequences.lengths, 0)
        np.testing.assert_array_equal(rollout.resumed_at, start)
        old = column < start[:, None]
        new = ~old & (column < rollout.lengths[:, None])
        for name in ("tokens", "law", "full", "writer", "versions"):
            kept_values, written = getattr(rollout, name), getattr(before.sequences, name)
            np.testing.assert_array_equal(kept_values[old], written[old], err_msg=name)
        assert (rollout.versions[new] == number).all()
        np.testing.assert_array_equal(new.any(axis=1), ~(going_on & before.sequences.done))

        # Half of the groups are trained on, all of which are done. Others wait, or leave when they are too old.
        whole, now = rollout.done.reshape(-1, GROUP).all(axis=1), trained_groups(rollout)
        assert now.sum() == TRAINED == len(rollout.batch.counted) // GROUP and rollout.batch.counted.all()
        counted = rollout.batch.completion & rollout.batch.counted[:, None]
        assert not rollout.batch.advantage[~counted].any()
        too_old = ~whole & (number + 1 - rollout.versions[::GROUP, 0] > 1)
        np.testing.assert_array_equal(kept, ~now & ~too_old)
        waiting = (whole & ~now).sum()
        assert metrics["groups/unfinished"] == kept.sum() - waiting and metrics["groups/too_old"] == too_old.sum()
        assert metrics["groups/waiting"] == waiting and metrics["reward/failed"] == 0
        assert metrics["groups/sequences_trained"] == TRAINED * GROUP
        waited += waiting
        assert metrics["rollout/tokens"] == new.sum() and metrics["rollout/unfinished"] == (~rollout.done).sum()
        trained += prompts.id[now].tolist()
        dropped += prompts.id[too_old].tolist()

        # Every token is weighted by the log-prob that it was written with; the alarm reads the newest alone.
        mu = rollout.batch.mu[rollout.batch.completion]
        rows = np.repeat(now, GROUP)
        np.testing.assert_array_equal(mu, rollout.full[rows][(column < rollout.lengths[:, None])[rows]])
        ratio = np.exp(log_probs(weights, rollout.batch.tokens) - rollout.batch.mu)[counted]
        assert np.isclose(metrics["ratio/mean"], ratio.mean(), atol=1e-5)
        ratios.append(ratio.max())
        assert metrics["rollout/logprob_alarm"] == 0 and metrics["rollout/logprob_gap_max"] < 1e-4
        ages = (number - rollout.versions)[rows][(old | new)[rows]]
        assert np.isclose(metrics["rollout/age_mean"], ages.mean()) and metrics["rollout/age_max"] == ages.max() <= 1

    assert dropped and waited and max(ratios) > 1.01
    # Every prompt that was taken is trained on, dropped, or goes on: once.
    assert sorted(trained + dropped + prompts.id[kept].tolist()) == taken == list(range(len(taken)))


def test_the_oldest_whole_groups_train_first_and_the_others_are_not_taken_again() -> None:
    """Three of four groups are whole, of which the last two are the oldest."""
    rows, by_token = 4 * GROUP, jnp.zeros((4 * GROUP, BUDGET), jnp.int32)
    began, done = (jnp.repeat(jnp.array(x), GROUP) for x in ([3, 0, 2, 1], [True, False, True, True]))
    likewise: dict[str, jax.Array] = dict.fromkeys(("law", "full"), by_token.astype(jnp.float32))
    likewise |= {"writer": by_token.astype(jnp.int8), "versions": by_token}
    rollout = Rollout(by_token, jnp.full(rows, 2), stopped=done, done=done, began=began, **likewise)
    config, prompts = replace(CARRYING.rollout, max_age=None), make_prompts(4)
    groups = divide_groups(rollout, 4, config)
    assert groups is not None and groups.trained.tolist() == [False, False, True, True]
    assert groups.waiting.tolist() == [True, False, False, False]
    asked = list[tuple[int, frozenset[int]]]()

    def take(count: int, taken: frozenset[int]) -> Prompts:
        asked.append((count, taken))
        return jax.tree.map(lambda x: np.asarray(x)[:count] + 1, prompts)

    carried = carry_over_of(config, prompts, rollout)
    after = next_prompts(carried, take)
    assert asked == [(2, frozenset(prompts.id[:2].tolist()))]
    np.testing.assert_array_equal(after.id, [*prompts.id[:2], *prompts.id[:2] + 1])


def test_unfinished_groups_take_no_place_of_dynamic_sampling() -> None:
    """The first two of four groups are unfinished. The other two fill the two places."""
    mesh, (policy, drafter) = mesh_of(1, 1, 1), networks()
    config = replace(CARRYING, selection=SelectionConfig(groups=2))
    rows, done = 4 * GROUP, jnp.repeat(jnp.array([False, False, True, True]), GROUP)
    by_token = jnp.zeros((rows, BUDGET))
    rollout = Rollout(
        tokens=by_token.astype(jnp.int32),
        lengths=jnp.full(rows, 2),
        stopped=done,
        law=by_token,
        full=by_token,
        done=done,
        resumed_at=jnp.zeros(rows, jnp.int32),
        versions=by_token.astype(jnp.int32),
        began=jnp.zeros(rows, jnp.int32),
    )
    values = jnp.where(done, (jnp.arange(rows) % 2).astype(jnp.float32), jnp.nan)
    scores = Reward(values, done.astype(jnp.float32))
    sequences, metrics = jax.jit(Stages(policy, drafter, count_fives, config, mesh).select)(
        rollout, make_prompts(4), scores
    )
    assert sequences.counted.all() and metrics["groups/sequences_trained"] == 2 * GROUP


@pytest.mark.slow
def test_sequences_go_on_from_rollout_to_rollout_of_a_mesh_of_their_own() -> None:
    stages = Stages(*networks(), HostReward(count_on_host), CARRYING, mesh_of(1, 1, 1))
    step = AsynchronousStep(stages, disjoint_mesh(MeshConfig(), stages.mesh))
    state = init_train_state(params_on(stages.mesh), CARRYING, stages.mesh, prompts=make_prompts().tokens.shape)
    supply, column, trained = fresh_prompts(), np.arange(BUDGET)[None], list[int]()
    state = step.begin(state, next_prompts(state.carried, supply))
    before = None
    for number in range(4):
        own = host_copy(state.ahead[0].prompts)
        state, rollout, metrics = step(state, next_prompts(state.carried, supply))
        rollout = host_copy(rollout)
        old = column < rollout.resumed_at[:, None]
        new = ~old & (column < rollout.lengths[:, None])
        # The rollouts of the first two steps are by the networks before the first update.
        assert (rollout.versions[new] == max(number - 1, 0)).all() and metrics["asynchronous/lag"] == min(number, 1)
        assert old.any() == (number > 0)
        for name in ("tokens", "full", "versions"):
            assert before is None or (getattr(rollout, name)[old] == getattr(before, name)[old]).all()
        trained += own.id[trained_groups(rollout)].tolist()
        before = rollout
    assert trained and len(set(trained)) == len(trained)


def trained_groups(rollout: Rollout) -> np.ndarray:
    """Return which groups a step trains on: the oldest of those that are whole."""
    assert rollout.done is not None and rollout.began is not None
    whole, began = np.asarray(rollout.done).reshape(-1, GROUP).all(axis=1), np.asarray(rollout.began)[::GROUP]
    return np.isin(np.arange(len(whole)), sorted(np.flatnonzero(whole), key=lambda group: began[group])[:TRAINED])


def fresh_prompts() -> Take:
    """Return endless prompts whose ids are 0, 1, .."""
    ids, known = itertools.count(), jax.tree.map(np.asarray, make_prompts())

    def take(count: int, used: frozenset[int]) -> Prompts:
        own = np.array([next(ids) for _ in range(count)], np.int32)
        return replace(jax.tree.map(lambda x: x[own % len(known.id)], known), id=own)

    return take


def test_what_carry_over_cannot_do_is_refused() -> None:
    """More in tests/launch/test_refusals.py."""
    mesh, carrying = mesh_of(1, 1, 1), RolloutConfig(group_size=2, carry_over=0.9, draft_length=0)
    assert [carrying.left_over(2 * groups) for groups in (9, 10, 19, 20)] == [2, 2, 4, 4]
    refused = [
        (lambda: RolloutConfig(carry_over=1.0), "carry_over = 1.0: must be"),
        (lambda: replace(CONFIG, rollout=carrying, loss=LossConfig(routing="replay")), "routing = replay"),
        (
            lambda: rollouts(WANDERING, "none", "none", carrying, 1, speculative_rollout),
            "prompts.carried: .*carry_over_rollout",
        ),
        (lambda: init_train_state(params_on(mesh), CARRYING, mesh), "carry_over = 0.5: the shape of the prompts"),
    ]
    for attempt, said in refused:
        with pytest.raises(ValueError, match=said):
            attempt()

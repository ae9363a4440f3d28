"""The draft length that is chosen is the one that pays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import cost
from specjax.cost import Acceptance, BatchProgress, Drafting, acceptance_length, init_drafting, unmeasured
from specjax.cost.choice import PRIOR_ROUNDS, UNTRIED_MARGIN
from specjax.types import Rollout
from tests.refusals import refuses

expected_rates, update_drafting = jax.jit(cost.rates), jax.jit(cost.update_drafting, static_argnums=3)
batch_gain, choose, could_pay, expected_speedup = (
    jax.jit(function, static_argnums=1)
    for function in (cost.batch_gain, cost.choose, cost.could_pay, cost.expected_speedup)
)


def drafting(acceptance: Acceptance, seconds: list[list[float]]) -> Drafting:
    """With no batch seen yet."""
    none = np.zeros((len(seconds), len(seconds[0])), np.float32)
    return Drafting(acceptance, BatchProgress(none, none), jnp.array(seconds))


def counted(drafted: int, *accepted: int, predicted: float = 0.0) -> Acceptance:
    return Acceptance(
        np.full(len(accepted), drafted, np.float32), jnp.array(accepted, jnp.float32), jnp.float32(predicted)
    )


def test_nothing_known_expects_what_is_predicted_and_a_geometric_law_behind_it():
    none = init_drafting((0, 3), np.ones((1, 2))).acceptance
    np.testing.assert_array_equal(expected_rates(none), [0, 0, 0])
    predicted = Acceptance(none.drafted, none.accepted, jnp.float32(0.8))
    np.testing.assert_allclose(expected_rates(predicted), [0.8, 0.64, 0.512], rtol=1e-6)
    np.testing.assert_allclose(acceptance_length(predicted, (0, 1, 3)), [1, 1.8, 2.952], rtol=1e-6)


@pytest.mark.parametrize(
    "drafted, accepted, predicted, expected",
    [
        ([1e5, 1e5], [9e4, 6e4], 0.2, [0.9, 0.6]),
        # Beyond the last counted position, rates continue from the counts.
        ([1e6, 0], [5e5, 0], 0.9, [0.5, 0.25]),
        # The second rate is that of fewer drafts. Later positions do not get a higher rate.
        ([1e6, 3e5, 0, 0], [1e5, 9e4, 0, 0], 0.1, [0.1, 0.3, 0.3, 0.3]),
    ],
)
def test_counts_outweigh_the_prediction(drafted: list, accepted: list, predicted: float, expected: list):
    counts = Acceptance(jnp.array(drafted), jnp.array(accepted), jnp.float32(predicted))
    np.testing.assert_allclose(expected_rates(counts), expected, rtol=1e-2)


def rollout(**statistics: np.ndarray) -> Rollout:
    return Rollout(np.zeros((5, 4), np.int32), np.zeros(5, np.int32), **statistics)


def test_old_steps_fade():
    known = init_drafting((0, 2), np.ones((1, 2)))
    for accepted in (0, 10):
        seen = rollout(drafted=np.full((5, 2), 10), accepted=np.full((5, 2), accepted))
        known = update_drafting(known, seen, jnp.float32(0.3), (0, 2))
    assert known.acceptance.predicted == jnp.float32(0.3)
    np.testing.assert_allclose(known.acceptance.drafted, 50 + 0.8 * 50)
    np.testing.assert_allclose(known.acceptance.accepted, 50)


def test_progress_counts_for_the_length_that_each_phase_of_each_shard_ran_at():
    """Two shards and three phases: sequences were admitted during the first phase, the last had no rounds."""
    known = init_drafting((0, 1, 3), np.ones((3, 3)))
    seen = rollout(
        loop_rounds=jnp.array([[9, 10, 0], [9, 20, 0]]),
        plain_rounds=jnp.array([[0, 25, 0], [0, 45, 0]]),
        draft_length=jnp.array([[3, 3, 1], [3, 3, 1]]),
    )
    known = update_drafting(update_drafting(known, seen, None, (0, 1, 3)), rollout(), None, (0, 1, 3))
    np.testing.assert_allclose(known.progress.gained, [[0, 0, 0], [0, 0, 70], [0, 0, 0]])
    np.testing.assert_allclose(known.progress.trips, [[0, 0, 0], [0, 0, 30], [0, 0, 0]])
    assert known.acceptance.predicted == 0


def test_a_rollout_may_lack_counts_but_not_have_those_of_other_phases():
    known = init_drafting((0, 2), np.ones((2, 2)))
    same = update_drafting(known, rollout(), None, (0, 2))
    assert jax.tree.all(jax.tree.map(lambda x, y: (x == y).all(), known, same))
    foreign = rollout(loop_rounds=jnp.ones((1, 1)), plain_rounds=jnp.ones((1, 1)), draft_length=jnp.ones((1, 1)))
    with refuses("plain_rounds:...1...2"):
        update_drafting(known, foreign, None, (0, 2))


def test_a_batchs_gain_is_measured_or_else_estimated_from_its_rows():
    """Rows gain 1.9 tokens per round, but the batches of the first phase only 1.5."""
    many = 1e4
    trips = jnp.array([[0, many], [0, 0]])
    known = Drafting(counted(10**6, 600_000, 300_000), BatchProgress(1.5 * trips, trips), jnp.ones((2, 2)))
    np.testing.assert_allclose(batch_gain(known, (0, 2)), [[1, 1.5], [1, 1.9]], rtol=1e-3)
    few = trips / many * PRIOR_ROUNDS
    known = Drafting(known.acceptance, BatchProgress(1.5 * few, few), known.seconds)
    # Eight measured rounds and a prior of eight: the ratio lies halfway between the measured one and 1.
    np.testing.assert_allclose(batch_gain(known, (0, 2))[0, 1], (1.5 + 1.7) / 2, rtol=1e-3)


def test_unmeasured_lengths_are_expected_to_reach_the_same_fraction():
    """A draft of 1 gained 0.3 of 0.6 expected tokens, so a draft of 3 is expected to gain 0.525 of 1.05."""
    many = counted(10**6, 600_000, 300_000, 150_000)
    trips = jnp.array([[0, 1e4, 0]])
    known = Drafting(many, BatchProgress(1.3 * trips, trips), jnp.ones((1, 3)))
    np.testing.assert_allclose(batch_gain(known, (0, 1, 3))[0], [1, 1.3, 1.525], rtol=2e-3)
    nothing = Drafting(counted(10**6, 0, 0, 0), known.progress, known.seconds)
    np.testing.assert_allclose(batch_gain(nothing, (0, 1, 3))[0], [1, 1.3, 1], rtol=2e-3)


def choices(steps: int, seconds: float, predicted: float | None, right: int = 0, **counts: np.ndarray) -> list[int]:
    """Return what is chosen in each step, of draft lengths 0 and 1, if rounds of length 1 take `seconds`.

    right: tenths of the drafts that are accepted. counts: further statistics of the rollouts.
    """
    state, chosen, trips = init_drafting((0, 1), np.array([[1.0, seconds]], np.float32)), [], np.full((1, 1), 50)
    for _ in range(steps):
        index = int(choose(state, (0, 1))[0])
        chosen.append(index)
        drafted = np.full((8, 1), 50 * index)
        counts |= dict(drafted=drafted, accepted=drafted * right // 10, plain_rounds=trips * (10 + right * index) // 10)
        seen = rollout(loop_rounds=trips, draft_length=0 * trips + index, **counts)
        state = update_drafting(state, seen, None if predicted is None else jnp.float32(predicted), (0, 1))
    return chosen


def test_a_length_that_lost_is_not_soon_tried_again():
    """A draft that costs a quarter more is given up, because its predicted gain never materialises."""
    chosen = choices(60, 1.25, 0.5)
    assert chosen[:2] == [0, 1] and 15 < chosen.index(1, 2) < 30


@pytest.mark.parametrize(
    "accepted, expected",
    [((0, 0, 0), [0, 0]), ((700, 500, 350), [0, 2]), ((990, 980, 970), [2, 2]), ((600, 100, 10), [0, 1])],
)
def test_each_phase_drafts_what_pays_there(accepted: tuple[int, ...], expected: list[int]):
    """A draft of 3 costs 2.8 plain rounds in the first phase and 1.5 in the second. It emits 1 + sum(rates) tokens."""
    seconds = [[1.0, 1.9, 2.8], [1.0, 1.2, 1.5]]
    known = drafting(counted(1000, *accepted, predicted=accepted[0] / 1000), seconds)
    np.testing.assert_array_equal(choose(known, (0, 1, 3)), expected)


@pytest.mark.parametrize("predicted, pays", [(0.0, False), (0.12, False), (0.14, True), (1.0, True)])
def test_without_measured_costs_nothing_is_drafted_and_acceptance_says_whether_to_measure(predicted: float, pays: bool):
    """A draft of 2 is expected to have 1 + p + p^2 tokens accepted; it pays from UNTRIED_MARGIN = 1.15."""
    known = drafting(counted(0, 0, 0, predicted=predicted), unmeasured(2, (0, 2)).tolist())
    np.testing.assert_array_equal(choose(known, (0, 2)), [0, 0])
    assert could_pay(known, (0, 2)) == pays


def test_expected_speed_is_relative_to_the_first_length():
    known = drafting(counted(10**6, 600_000, 300_000), [[1.0, 1.6], [1.0, 3.8]])
    np.testing.assert_allclose(expected_speedup(known, (0, 2)), [[1.0, 1.9 / 1.6], [1.0, 0.5]], rtol=1e-4)
    assert choose(known, (0, 2)).tolist() == [1, 0]


@pytest.mark.parametrize(
    "gain, ran, expected", [(1.13, 0, 0), (1.17, 0, 1), (1.06, 10**6, 0), (1.1, 10**6, 1), (1.1, 1, 0), (1.12, 20, 1)]
)
def test_a_longer_draft_must_beat_a_margin_that_shrinks_with_measurements(gain: float, ran: int, expected: int):
    many, trips = counted(10**8, 10**8, predicted=1.0), jnp.array([[0.0, ran]])
    known = Drafting(many, BatchProgress(2 * trips, trips), jnp.array([[1.0, 2.0 / gain]]))
    assert choose(known, (0, 1))[0] == expected


@pytest.mark.parametrize("ran, expected", [(0.0, 1), (1e6, 2)])
def test_a_good_short_draft_is_kept_until_a_longer_one_measures_better(ran: float, expected: int):
    """A draft of 1 measured 1.2 times the speed of plain decoding; a draft of 3 predicts 1.35."""
    trips = jnp.array([[0.0, 1e6, ran]])
    seen = BatchProgress(jnp.array([[0.0, 1.2, 1.0]]) * trips, trips)
    assert choose(Drafting(counted(10**8, 0, 0, 0), seen, jnp.array([[1.0, 1.0, 0.74]])), (0, 1, 3))[0] == expected


def test_the_margin_covers_the_wait_for_the_slowest_row():
    """32 rows of 256 tokens with acceptance 0.75: the batch gains a tenth less than its mean row."""

    def rounds(key: jax.Array) -> jax.Array:
        drawn = jax.random.bernoulli(key, 0.75, (256, 32, 3))
        gained = jnp.cumsum(1 + jnp.sum(jnp.cumprod(drawn, axis=2), axis=2), axis=0)
        return 1 + jnp.sum(gained < 256, axis=0)

    taken = np.asarray(jax.vmap(rounds)(jax.random.split(jax.random.key(0), 50)))
    assert 1.07 < taken.max(axis=1).mean() / taken.mean() < UNTRIED_MARGIN - 0.02


def test_hindsight_replaces_a_missing_prediction():
    """Counts of two shards are added. The tokens that were drafted are not counted a second time."""
    known = init_drafting((0, 2), np.ones((1, 2)))
    hindsight = jnp.array([[[100, 90], [30, 10]], [[60, 50], [10, 4]]])
    seen = rollout(lookup_counts=hindsight, drafted=np.full((5, 2), 10), accepted=np.full((5, 2), 9))
    known = update_drafting(known, seen, None, (0, 2))
    np.testing.assert_allclose(known.acceptance.drafted, [160, 140])
    np.testing.assert_allclose(known.acceptance.accepted, [40, 14])
    many = jax.tree.map(lambda x: 1000 * x, known.acceptance)
    np.testing.assert_allclose(expected_rates(many), [0.25, 0.1], rtol=1e-2)


@pytest.mark.parametrize("right, expected", [(0, [0] * 30), (9, [0] + [1] * 29)])
def test_a_lookup_is_used_only_if_hindsight_says_that_it_pays(right: int, expected: list[int]):
    """With only 10 tokens, a batch gains as much as its mean row."""
    hindsight = np.array([[[500], [50 * right]]])
    assert choices(30, 1.5, None, right, lookup_counts=hindsight) == expected

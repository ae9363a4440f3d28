"""The cost model finds the constants it was made with, and the choice is the one that pays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.cost import (
    MARGIN,
    Acceptance,
    Cell,
    CostModel,
    Drafting,
    acceptance_length,
    choose,
    fit,
    no_acceptance,
    promised,
    remember,
)
from specjax.cost import rates as expected_rates
from specjax.plan import Phase

SHAPES = [(slots, window, k) for slots in (4, 16, 64) for window in (128, 1024) for k in (0, 1, 3, 7)]


def cells(model: CostModel, noise: float = 0.0) -> list[Cell]:
    random = np.random.default_rng(0)
    return [Cell(*shape, model.seconds(*shape) * float(np.exp(noise * random.normal()))) for shape in SHAPES]


def counted(drafted: int, *accepted: int, predicted: float = 0.0) -> Acceptance:
    return Acceptance(
        jnp.full(len(accepted), drafted, jnp.float32), jnp.array(accepted, jnp.float32), jnp.float32(predicted)
    )


@pytest.mark.parametrize(
    "model",
    [CostModel(3e-3, 2e-5, 1e-8, 4e-4, 3e-6), CostModel(0.0, 2e-5, 0.0, 0.0, 3e-6), CostModel(1e-3, 0, 0, 0, 0)],
)
def test_the_constants_are_found_again(model: CostModel):
    np.testing.assert_allclose(fit(cells(model)), model, rtol=1e-6, atol=1e-12)


def test_a_table_holds_the_seconds_of_every_phase_and_length():
    model = CostModel(3e-3, 2e-5, 1e-8, 4e-4, 3e-6)
    table = model.table([Phase(4, 128), Phase(16, 1024)], (0, 3))
    assert table.dtype == np.float32 and table.shape == (2, 2)
    np.testing.assert_allclose(table[1, 1], model.seconds(16, 1024, 3), rtol=1e-6)


def test_no_constant_is_negative_and_noise_is_averaged_out():
    model = CostModel(1e-3, 2e-5, 0.0, 0.0, 3e-6)
    found = fit(cells(model, noise=0.1))
    assert min(found) >= 0
    for shape in SHAPES:
        assert abs(found.seconds(*shape) / model.seconds(*shape) - 1) < 0.15


def test_nothing_known_expects_what_is_predicted_and_a_geometric_law_behind_it():
    none = no_acceptance(3)
    np.testing.assert_array_equal(expected_rates(none), [0, 0, 0])
    predicted = Acceptance(none.drafted, none.accepted, jnp.float32(0.8))
    np.testing.assert_allclose(expected_rates(predicted), [0.8, 0.64, 0.512], rtol=1e-6)
    np.testing.assert_allclose(acceptance_length(predicted, (0, 1, 3)), [1, 1.8, 2.952], rtol=1e-6)


def test_counts_outweigh_the_prediction_and_lead_on_where_they_end():
    many = counted(100_000, 90_000, 60_000, predicted=0.2)
    np.testing.assert_allclose(expected_rates(many), [0.9, 0.6], atol=1e-3)
    part = Acceptance(jnp.array([1e6, 0]), jnp.array([5e5, 0]), jnp.float32(0.9))
    np.testing.assert_allclose(expected_rates(part), [0.5, 0.25], atol=1e-3)


def test_old_steps_fade():
    acceptance = no_acceptance(2)
    for accepted in (0, 10):
        drafted = jnp.full((5, 2), 10)
        acceptance = remember(acceptance, drafted, jnp.full((5, 2), accepted), jnp.float32(0.3))
    assert acceptance.predicted == jnp.float32(0.3)
    np.testing.assert_allclose(acceptance.drafted, 50 + 0.8 * 50)
    np.testing.assert_allclose(acceptance.accepted, 50)


@pytest.mark.parametrize(
    "accepted, expected",
    [((0, 0, 0), [0, 0]), ((700, 500, 350), [0, 2]), ((990, 980, 970), [2, 2]), ((600, 100, 10), [0, 1])],
)
def test_each_phase_drafts_what_pays_there(accepted: tuple[int, ...], expected: list[int]):
    """In the first phase a draft of 3 costs 2.8 plain rounds, in the second 1.5; against them stands 1 + the rates."""
    seconds = jnp.array([[1.0, 1.9, 2.8], [1.0, 1.2, 1.5]])
    drafting = Drafting(counted(1000, *accepted, predicted=accepted[0] / 1000), seconds)
    np.testing.assert_array_equal(choose(drafting, (0, 1, 3)), expected)


def test_what_is_promised_is_tokens_a_second_relative_to_the_first_length():
    drafting = Drafting(counted(10**6, 600_000, 300_000), jnp.array([[1.0, 1.6], [1.0, 3.8]]))
    np.testing.assert_allclose(promised(drafting, (0, 2)), [[1.0, 1.9 / 1.6], [1.0, 0.5]], rtol=1e-4)
    assert choose(drafting, (0, 2)).tolist() == [1, 0]


@pytest.mark.parametrize("gain, margin, expected", [(1.08, 1.1, 0), (1.12, 1.1, 1), (1.08, 1.0, 1), (0.99, 1.0, 0)])
def test_a_longer_draft_must_promise_more_than_the_margin(gain: float, margin: float, expected: int):
    many = counted(10**8, 10**8, predicted=1.0)
    drafting = Drafting(many, jnp.array([[1.0, 2.0 / gain]]))
    assert choose(drafting, (0, 1), margin)[0] == expected


def test_the_margin_is_what_waiting_for_the_slowest_row_takes():
    """32 rows of 256 tokens, each accepted at 0.75: the batch gains a tenth less than its rows do on average."""

    def rounds(key: jax.Array) -> jax.Array:
        drawn = jax.random.bernoulli(key, 0.75, (256, 32, 3))
        gained = jnp.cumsum(1 + jnp.sum(jnp.cumprod(drawn, axis=2), axis=2), axis=0)
        return 1 + jnp.sum(gained < 256, axis=0)

    taken = np.asarray(jax.vmap(rounds)(jax.random.split(jax.random.key(0), 50)))
    assert taken.max(axis=1).mean() / taken.mean() == pytest.approx(MARGIN, abs=0.03)

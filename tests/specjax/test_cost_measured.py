"""A cost model finds the constants of the rounds that it is fitted to, and measurements go before it."""

import numpy as np
import pytest

from specjax.cost import Cell, CostModel, ExpertCounts, Forward, corrected, fit, round_seconds
from specjax.rollout.plan import Phase
from specjax.types import Mixture

SHAPES = [(slots, window, k) for slots in (4, 16, 64) for window in (128, 1024) for k in (0, 1, 3, 7)]
MIXTURE = Mixture(layers=48, experts=128, active=8)


def made(
    fixed: float,
    product: float,
    cached: float = 0.0,
    attended: float = 0.0,
    draft: float = 0.0,
    draft_pass: float = 0.0,
    drafted: float = 0.0,
) -> CostModel:
    policy = Forward(fixed, product=product, cached=cached, attended=attended)
    return CostModel(policy, Forward(draft + draft_pass, sample=drafted), Forward(draft_pass, sample=drafted))


ALL = made(3e-3, 2e-5, 1e-8, 2e-9, 1e-3, 4e-4, 3e-6)
FEW = made(1e-3, 2e-5, draft_pass=4e-4)


def seconds(model: CostModel, slots: int, window: int, k: int) -> float:
    return float(model.seconds(slots, slots * window, k))


def cells(model: CostModel, noise: float = 0.0, shapes: list[tuple[int, int, int]] = SHAPES) -> list[Cell]:
    random = np.random.default_rng(0)
    return [Cell(*shape, seconds(model, *shape) * float(np.exp(noise * random.normal()))) for shape in shapes]


@pytest.mark.parametrize("model", [ALL, made(0.0, 2e-5, drafted=3e-6), made(1e-3, 0.0)])
def test_the_constants_are_found_again(model: CostModel):
    found = fit(cells(model)).constants()
    assert {name for name, value in found.items() if value > 1e-11} == model.constants().keys()
    for name, value in model.constants().items():
        assert found[name] == pytest.approx(value, rel=1e-5)


def test_a_mixture_of_experts_has_the_cost_of_those_that_are_touched():
    """One row of 128 experts, 8 of a token: a verification of 4 tokens reads more of them than a round of one."""
    experts = ExpertCounts(MIXTURE.experts, MIXTURE.active)
    np.testing.assert_allclose([experts.touched(1, n) for n in (1, 4, 32)], [8, 29.1, 111.8], atol=0.1)
    # Tokens of one row choose alike; those of other rows, or of other replicas, do not.
    assert experts._replace(independence=0.0).touched(3, 4) == pytest.approx(experts.touched(3, 1))
    assert experts._replace(replicas=4).touched(2, 1) == pytest.approx(experts.touched(8, 1))
    policy = Forward(3e-3, product=2e-5, cached=1e-8, expert=1e-4, experts=experts)
    model = CostModel(policy, Forward(1.4e-3, sample=3e-6), Forward(4e-4, sample=3e-6))
    few = [(slots, window, k) for slots in (1, 2, 4, 16) for window in (128, 1024) for k in (0, 1, 3, 7)]
    found = fit(cells(model, shapes=few), MIXTURE)
    assert found.policy.expert == pytest.approx(1e-4, rel=1e-4)
    table = round_seconds(cells(model, shapes=few), [Phase(1, 512)], (0, 3), MIXTURE)
    np.testing.assert_allclose(table[0], [seconds(model, 1, 512, k) for k in (0, 3)], rtol=1e-4)


def test_a_table_holds_the_seconds_of_every_phase_and_length():
    table = round_seconds(cells(ALL), [Phase(4, 128), Phase(32, 1024)], (0, 2))
    assert table.dtype == np.float32 and table.shape == (2, 2)
    expected = [[seconds(ALL, *phase, k) for k in (0, 2)] for phase in ((4, 128), (32, 1024))]
    np.testing.assert_allclose(table, expected, rtol=1e-5)


def test_a_round_that_was_measured_takes_what_it_took():
    """Three times, of which one was disturbed; the model would have it on the line through the others."""
    odd = [Cell(4, 128, 1, seconds) for seconds in (0.05, 0.9, 0.04)]
    known = [cell for cell in cells(FEW) if cell[:3] != (4, 128, 1)]
    np.testing.assert_allclose(round_seconds([*known, *odd], [Phase(4, 128)], (1,)), [[0.05]], rtol=1e-6)


def test_an_error_that_all_rounds_of_a_phase_share_favours_none_of_them():
    """A phase twice as slow as the model has it; one of its lengths was not measured."""
    slow = [Cell(8, 256, k, 2 * seconds(FEW, 8, 256, k)) for k in (0, 3)]
    first, middle, last = round_seconds([*(cells(FEW) * 20), *slow], [Phase(8, 256)], (0, 1, 3))[0]
    np.testing.assert_allclose([first, last], [cell.seconds for cell in slow], rtol=1e-6)
    np.testing.assert_allclose(middle, 2 * seconds(FEW, 8, 256, 1), rtol=0.02)
    # A model of other origin is corrected likewise, and left alone in a phase without a measurement.
    table = corrected(FEW, slow, [Phase(8, 256), Phase(4, 128)], (0, 1))
    expected = [[2 * seconds(FEW, 8, 256, k) for k in (0, 1)], [seconds(FEW, 4, 128, k) for k in (0, 1)]]
    np.testing.assert_allclose(table, expected, rtol=1e-6)


def test_no_constant_is_negative_and_noise_is_averaged_out():
    model = made(1e-3, 2e-5, drafted=3e-6)
    found = fit(cells(model, noise=0.1))
    assert min(found.constants().values()) >= 0
    for shape in SHAPES:
        assert seconds(found, *shape) / seconds(model, *shape) == pytest.approx(1, abs=0.15)

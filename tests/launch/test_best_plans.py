"""The choice of plans in the closing comparison."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from launch.cli.unfinished import Unfinished
from launch.comparison.best_plans import SCREENED, PhasedRollout, best_against_best, tail_of
from launch.costs.rollout_timer import RolloutTime
from specjax import MeshConfig, NoDrafter, Params, Prompts, RolloutConfig, make_mesh
from specjax.rollout.speculative import speculative_rollout
from specjax.testing import tiny_policy


@pytest.mark.parametrize(
    ("shards", "group_size", "prompts", "samples"),
    [(1, 1, [[1, 3, 5, 7], [8, 10, 12, 14]], 1), (1, 4, [[7], [14]], 4), (1, 3, [[5, 7], [12, 14]], 2)]
    + [(2, 4, [[3, 7], [10, 14]], 2), (2, 1, [[1, 3, 5, 7], [8, 10, 12, 14]], 1), (8, 2, [[*range(8)]] * 2, 1)],
)
def test_the_tail_is_four_sequences_of_the_longest_groups(
    shards: int, group_size: int, prompts: list[list[int]], samples: int
):
    turns = np.arange(16).reshape(2, 8) if shards < 8 else np.tile(np.arange(8), (2, 1))
    # Odd prompts are longer in the first turn, even ones in the second. Lengths grow with the index.
    means = np.where(turns % 2 == (np.arange(2)[:, None] + 1) % 2, 100, 50) + turns
    lengths = np.repeat(means[..., None], group_size, axis=-1)
    lengths[..., 0] -= 1 if group_size == 1 else 30
    chosen, count = tail_of(turns, lengths.reshape(2, -1), shards, group_size)
    assert count == samples and np.sort(chosen, axis=1).tolist() == prompts


class Fake:
    """Program with two phases. speeds: tokens/s by draft lengths; each turn is a tenth faster than the one before."""

    def __init__(self, draft_lengths: tuple[int, ...], speeds: dict[tuple[int, ...], float]) -> None:
        self.draft_lengths, self.speeds, self.phases = draft_lengths, speeds, [SimpleNamespace(slots=4)] * 2
        self.asked: list[tuple[tuple[int, ...], int]] = []

    def measure(self, draft_lengths: tuple[int, ...], turn: int) -> RolloutTime:
        self.asked.append((draft_lengths, turn))
        drafted = max(draft_lengths) > 0
        seconds = 60 / (self.speeds[draft_lengths] * 1.1**turn)
        return RolloutTime(np.array([10, 20, 30]), 2.0 if drafted else 1.0, seconds, 15 if drafted else 30)


def test_the_best_plan_of_each_kind_is_measured_in_turns_that_did_not_choose_it():
    plain: Any = [Fake((0,), {(0, 0): 90.0}), Fake((0,), {(0, 0): 100.0})]
    drafting: Any = [Fake((0, 3), {(0, 3): 180.0, (3, 3): 120.0}), Fake((0, 3), {(0, 3): 150.0, (3, 3): 170.0})]
    found = best_against_best(plain, drafting, 3, Unfinished())
    assert found.plain.rollout is plain[1] and found.speculative.rollout is drafting[0]
    assert found.speculative.draft_lengths == (0, 3)
    assert found.speedup == pytest.approx((1.8, 1.8, 1.8)) and found.acceptance_length == 2.0
    # Rounds are compared at the same slots: 60 tokens at 180/s in 15 rounds, over 60 tokens at 90/s in 30.
    assert found.cost == pytest.approx((60 / 180 / 15) / (60 / 90 / 30))
    assert found.plain_tokens_per_s == pytest.approx(110) and found.lengths.tolist() == [[10, 20, 30]] * 3
    for rollout in drafting:
        screened = [turn for _, turn in rollout.asked[: 2 * SCREENED]]
        assert sorted(set(screened)) == [3 + turn for turn in range(SCREENED)]
    assert [turn for _, turn in drafting[0].asked[2 * SCREENED :]] == [0, 1, 2] and not plain[0].asked[SCREENED + 3 :]


def test_a_machine_that_slows_down_does_not_choose_the_plan():
    class Slowing(Fake):
        def measure(self, draft_lengths: tuple[int, ...], turn: int) -> RolloutTime:
            measured = super().measure(draft_lengths, turn)
            return replace(measured, seconds=measured.seconds * 1.1 ** len(self.asked))

    plain: Any = [Slowing((0,), {(0, 0): 100.0})]
    # If each plan ran all its turns at once, the slower plan would seem much faster.
    drafting: Any = [Slowing((0, 3), {(0, 3): 150.0, (3, 3): 160.0})]
    assert best_against_best(plain, drafting, 3, Unfinished()).speculative.draft_lengths == (3, 3)


def test_a_plan_is_chosen_by_total_tokens_over_total_time():
    class Bimodal(Fake):
        def measure(self, draft_lengths: tuple[int, ...], turn: int) -> RolloutTime:
            measured = super().measure(draft_lengths, turn)
            return replace(measured, seconds=60 / (150 if draft_lengths == (3, 3) else 120 if turn % 8 < 5 else 400))

    plain: Any = [Fake((0,), {(0, 0): 100.0})]
    # In most turns, the other plan is faster.
    drafting: Any = [Bimodal((0, 3), {(0, 3): 1.0, (3, 3): 1.0})]
    assert best_against_best(plain, drafting, 3, Unfinished()).speculative.draft_lengths == (0, 3)


def test_parameters_are_prepared_before_every_pass_of_a_program():
    policy, weights = tiny_policy(vocab_size=4)
    calls = 0

    def prepared() -> Params:
        nonlocal calls
        calls += 1
        return Params(policy=weights, draft={})

    prompts = Prompts(jnp.ones((2, 3), jnp.int32), jnp.full(2, 3, jnp.int32), jnp.arange(2, dtype=jnp.int32))
    config = RolloutConfig(group_size=2, max_new_tokens=4, draft_lengths=(0,))
    experiment: Any = SimpleNamespace(
        networks=SimpleNamespace(policy=policy), mesh=make_mesh(MeshConfig(1, 1, 1)), rollout_fn=speculative_rollout
    )
    rollout = PhasedRollout(experiment, NoDrafter(), prepared, config, [prompts])
    before = calls
    first, again = rollout.measure((0,), 0), rollout.measure((0,), 0)
    assert calls == before + 2 and first.lengths.shape == (4,) and first.rounds == 3
    np.testing.assert_array_equal(first.lengths, again.lengths)

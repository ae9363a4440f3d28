"""The two timers, the clock of compilation, the order of turns, and intervals."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.bench.models import BenchNetworks, random_networks, random_prompts
from benchmarks.bench.rollout_timer import RolloutTimer
from benchmarks.bench.stubs import FreeDrafter
from launch.costs.round_timer import RoundTimer, TimedRounds
from launch.phases.compile_clock import CompileClock
from launch.timing import describe_interval, format_interval, geometric_mean, interleaved, interval, minus_startup
from specjax.drafters import NoDrafter
from specjax.keys import seed_step
from specjax.rollout.generate import per_shard
from specjax.rollout.plan import Phase, RolloutConfig
from specjax.rollout.rounds import RoundState
from specjax.rollout.speculative import speculative_rollout
from specjax.types import Params
from tests.benchmarks.presets import SMALL


@pytest.fixture(scope="module")
def networks() -> BenchNetworks:
    return random_networks(SMALL)


def test_turns_reverse_their_order() -> None:
    order: list[str] = []

    def run(name: str) -> float:
        order.append(name)
        return float(len(order))

    measured = interleaved({"a": lambda: run("a"), "b": lambda: run("b")}, 3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert measured == {"a": [1.0, 4.0, 5.0], "b": [2.0, 3.0, 6.0]}


def test_the_interval_holds_the_true_median_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(100):
        _, low, high = interval(list(rng.lognormal(size=25)))
        inside += low <= 1.0 <= high
    assert 85 <= inside <= 100


def test_a_geometric_mean_counts_every_ratio_alike() -> None:
    center, low, high = interval([2.0, 0.5, 1.0, 1.0], center=geometric_mean)
    assert center == pytest.approx(1.0) and low < 1.0 < high
    assert interval([4.0, 1.0], center=geometric_mean) == pytest.approx((2.0, 1.0, 4.0))


def test_row_111_one_value_has_no_interval() -> None:
    assert [format_interval(values) for values in ([0.54], [0.5, 0.6])] == ["0.54", "0.55 [0.5, 0.6]"]
    assert [describe_interval(count) for count in (1, 2, 6)] == ["", " with their range", " with 95% intervals"]


@pytest.mark.parametrize("total, startup, left", [(5.0, 2.0, 3.0), (5.0, 5.0, 5.0), (5.0, 6.0, 5.0)])
def test_startup_is_not_subtracted_if_noise_exceeds_it(total: float, startup: float, left: float) -> None:
    assert minus_startup(total, startup) == left


@pytest.mark.parametrize("blank", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_round_is_timed_without_its_start(networks: BenchNetworks, monkeypatch: pytest.MonkeyPatch, blank: bool):
    """All kinds of rounds of a phase share a state. Another drafter's rounds change only the policy's part of it."""
    seen: dict[int, int] = {}

    def clock(run: Callable[[], RoundState]) -> float:
        """Clock that adds 10 s per program and 0.5 s per round."""
        rounds = run().row_rounds
        before = seen.get(len(rounds), 0)
        seen[len(rounds)] = int(rounds.max())
        return 10.0 + 0.5 * (seen[len(rounds)] - before)

    monkeypatch.setattr("launch.costs.round_timer.time_call", clock)
    free, large, small = FreeDrafter(networks.policy.vocab_size), Phase(4, 20), Phase(2, 12)
    kinds = {
        "plain": TimedRounds(large, 0, free),
        "free": TimedRounds(large, 2, free),
        "whole": TimedRounds(large, 2),
        "small": TimedRounds(small, 2),
    }
    config, prompts = RolloutConfig(group_size=2, max_new_tokens=16, draft_length=2), random_prompts(networks, 2, 4)
    timer = RoundTimer(networks.policy, networks.drafter, config, prompts, networks.mesh, kinds, 3, blank=blank)
    measure = timer.start(networks.params)
    states = measure["plain"].__self__.states  # pyright: ignore[reportFunctionMemberAccess]
    assert {phase: len(state.done) for phase, state in states.items()} == {large: 4, small: 2}
    assert {state.cache[0].k.shape[2] for state in states.values()} == {20 + config.slack, 12 + config.slack}
    for name, kind in kinds.items():
        before = jax.tree.map(np.array, states[kind.phase].draft)
        assert measure[name]() == 0.5
        same = jax.tree.map(lambda a, b: bool((a == b).all()), before, states[kind.phase].draft)
        assert all(jax.tree.leaves(same)) == (kind.drafter is not None)
    assert timer.compile_seconds.keys() == kinds.keys()


@pytest.mark.slow
def test_a_rollout_is_timed_on_the_prompts_and_noise_of_its_turn(networks: BenchNetworks):
    config = RolloutConfig(group_size=2, max_new_tokens=6, draft_length=0)
    prompts = random_prompts(networks, 4, 4)
    turns = [jax.tree.map(lambda x, at=at: x[at : at + 2], prompts) for at in (0, 2)]
    asked: list[Params] = []

    def prepared() -> Params:
        asked.append(networks.params)
        return networks.params

    generate = per_shard(speculative_rollout, networks.policy, NoDrafter(), config, networks.mesh)
    timer = RolloutTimer(generate, networks.policy, prepared, turns, networks.mesh, None, seed=7)
    before = len(asked)
    for turn in range(3):
        measured, rollout = timer.measure(turn, None), timer.generate(turn, None)
        drawn = networks.params, turns[turn % 2], seed_step(7, -2 - turn)
        expected = speculative_rollout(networks.policy, NoDrafter(), *drawn, config)
        np.testing.assert_array_equal(rollout.tokens, expected.tokens)
        np.testing.assert_array_equal(measured.lengths, expected.lengths)
        assert measured.acceptance_length == 1.0 and measured.rounds == 5
        assert measured.tokens_per_s * measured.seconds == pytest.approx(24)
        assert measured.seconds_per_round == measured.seconds / 5
    assert len(asked) - before == 6


def test_the_clock_counts_what_is_compiled_and_nothing_else() -> None:
    x = jax.random.normal(jax.random.key(0), 3)
    program = jax.jit(lambda x: jnp.sin(x) * 3.25)
    clock = CompileClock()
    program(x).block_until_ready()
    assert clock.lap() > 0
    program(x).block_until_ready()
    assert clock.lap() == 0

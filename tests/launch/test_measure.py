"""Benchmarks' timing: order of turns, intervals."""

import numpy as np
import pytest

from launch.timing import geometric_mean, in_turns, interval, without_start


def test_each_run_goes_first_in_turn() -> None:
    order: list[str] = []

    def run(name: str) -> float:
        order.append(name)
        return float(len(order))

    measured = in_turns({"a": lambda: run("a"), "b": lambda: run("b")}, 3)
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


@pytest.mark.parametrize("whole, start, left", [(5.0, 2.0, 3.0), (5.0, 5.0, 5.0), (5.0, 6.0, 5.0)])
def test_a_start_that_noise_made_longer_than_the_whole_is_not_taken_off(
    whole: float, start: float, left: float
) -> None:
    assert without_start(whole, start) == left

"""The comparison of lags, on very little of everything."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import algorithms, lag
from configs.override import override


def run(lag_: int, seed: int, after: float) -> lag.LagRun:
    return lag.LagRun(lag_, seed, after, gap=1e-3, ratio_max=1.5, acceptance=1.2, seconds=1.0, accuracy=[after])


def test_an_accuracy_below_the_spread_of_the_seeds_is_marked() -> None:
    plain = [run(0, seed, after) for seed, after in enumerate((0.70, 0.72, 0.74))]
    near = [run(1, seed, after) for seed, after in enumerate((0.69, 0.71, 0.73))]
    far = [run(2, seed, after) for seed, after in enumerate((0.60, 0.61, 0.62))]
    lines, sound = lag.table([*plain, *near, *far])
    assert not sound and [line.endswith("BELOW THE SPREAD") for line in lines] == [False, False, False, True]
    assert lag.table([*plain, *near, *(replace(each, lag=2) for each in near)])[1]


@pytest.mark.slow
def test_every_lag_is_run_and_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = algorithms.recipes
    small = {"warmup.steps": 2}
    monkeypatch.setattr(lag, "recipes", lambda directory: {"sorting": override(full(directory)["sorting"], small)})
    options = ["--steps", "2", "--seeds", "1", "--json", str(tmp_path / "runs.json")]
    # Its status depends on what two steps have learnt.
    assert lag.main(options) in (0, 1)
    runs = json.loads((tmp_path / "runs.json").read_text())
    assert [(each["lag"], each["seed"], len(each["accuracy"])) for each in runs] == [(0, 0, 2), (1, 0, 2), (2, 0, 2)]
    monkeypatch.setattr(lag, "learn", None)
    assert lag.main(options) in (0, 1)

"""The comparison of algorithms, at tiny sizes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import algorithms
from tests.documents import ROOT


@pytest.mark.slow
def test_every_task_and_algorithm_is_run_and_put_in_tables_and_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    full = algorithms.recipes

    def small(directory: Path):
        made = full(directory).items()
        return {task: replace(config, warmup=replace(config.warmup, steps=2)) for task, config in made}

    monkeypatch.setattr(algorithms, "recipes", small)
    written = tmp_path / "runs.json"
    names = ["DAPO", "importance by token", algorithms.CONTROL]
    options = ["--steps", "2", "--json", str(written), "--plots", str(tmp_path / "plots")]
    assert algorithms.main(["--algorithms", *names, *options]) == 1
    runs = json.loads(written.read_text())
    assert [(run["task"], run["algorithm"]) for run in runs] == [
        (task, name) for task in ("sums", "sorting") for name in names
    ]
    assert all(len(run["accuracy"]) == 2 for run in runs)
    # From the same policy.
    assert runs[0]["before"] == runs[1]["before"]
    # Both tasks, except the control.
    assert capsys.readouterr().out.count("did not learn: NOT AS IT SHOULD") == 4
    assert all((run["gap"] > 1e-4) == (run["algorithm"] == "importance by token") for run in runs)
    assert len(list((tmp_path / "plots").glob("*.png"))) == 1
    # Existing results are put in the table without a new run.
    monkeypatch.setattr(algorithms, "learn", None)
    assert algorithms.main(["--algorithms", *names, *options]) == 1
    assert capsys.readouterr().out.count("did not learn") == 6


@pytest.mark.parametrize("name", algorithms.ALGORITHMS)
def test_each_algorithm_gives_a_valid_run(name: str, tmp_path: Path) -> None:
    plain = [recipe for recipe in algorithms.recipes(tmp_path).values()]
    changed = [algorithms.ALGORITHMS[name](config) for config in plain]
    assert (changed == plain) == (name in ("GRPO", algorithms.CONTROL))


def test_digits_are_put_in_order(tmp_path: Path) -> None:
    algorithms.sorting(tmp_path / "digits.jsonl", count=20)
    lines = [json.loads(line) for line in (tmp_path / "digits.jsonl").read_text().splitlines()]
    assert len({line["question"] for line in lines}) == 20
    assert all(sorted(line["question"].rstrip("=")) == list(line["answer"]) for line in lines)
    assert all(line["solution"] == f"#{line['answer']}" for line in lines)


def test_every_algorithm_has_learnt_both_tasks() -> None:
    """The committed results cover all algorithms."""
    found = json.loads((ROOT / "benchmarks" / "results" / "algorithms_cpu.json").read_text())
    runs = [algorithms.Learned(**run) for run in found]
    assert {(run.task, run.algorithm) for run in runs} == {
        (task, name) for task in ("sums", "sorting") for name in algorithms.ALGORITHMS
    }
    assert all(run.as_expected for run in runs)

"""The comparison of algorithms, at tiny sizes."""

import json
from pathlib import Path

import pytest

from benchmarks import algorithms
from configs.override import override
from tests.documents import ROOT


@pytest.mark.slow
def test_every_task_and_algorithm_is_run_and_put_in_tables_and_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    full, small = algorithms.recipes, {"warmup.steps": 2}
    recipes = {task: override(config, small) for task, config in full(tmp_path).items()}
    monkeypatch.setattr(algorithms, "recipes", lambda directory: recipes)
    written = tmp_path / "runs.json"
    names = ["DAPO", "importance by token", algorithms.CONTROL]
    options = ["--steps", "2", "--json", str(written), "--plots", str(tmp_path / "plots")]
    assert algorithms.main(["--algorithms", *names, *options]) == 1
    runs = json.loads(written.read_text())
    expected = [(task, name) for task in ("sums", "sorting") for name in names]
    assert [(run["task"], run["algorithm"]) for run in runs] == expected
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


def test_each_algorithm_gives_a_valid_run(tmp_path: Path) -> None:
    plain = [*algorithms.recipes(tmp_path).values()]
    for name, algorithm in algorithms.ALGORITHMS.items():
        assert ([*map(algorithm, plain)] == plain) == (name in ("GRPO", algorithms.CONTROL))


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
    expected = {(task, name) for task in ("sums", "sorting") for name in algorithms.ALGORITHMS}
    assert {(run.task, run.algorithm) for run in runs} == expected
    assert all(run.as_expected for run in runs)

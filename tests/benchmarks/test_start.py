"""The benchmark of the start of a run."""

import json
from pathlib import Path

import pytest

from benchmarks.start import _stepped, seconds_to_first_step


def test_the_first_step_has_ended_once_its_metrics_are_whole(tmp_path: Path):
    metrics = tmp_path / "metrics.jsonl"
    assert not _stepped(metrics)
    first, evaluated = json.dumps({"step": 1}), json.dumps({"step": 0})
    for text, ended in ((f"{evaluated}\n", False), (f"{evaluated}\n{first[:-3]}", False), (f"{first}\n", True)):
        metrics.write_text(text)
        assert _stepped(metrics) == ended


def test_a_run_that_ends_before_says_why(tmp_path: Path):
    package = tmp_path / "launch"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text("import sys; print(sys.argv[1]); raise SystemExit(2)")
    with pytest.raises(RuntimeError, match=r"(?s)no step after \d+ s in .*: some_recipe"):
        seconds_to_first_step(tmp_path, ["some_recipe"], tmp_path / "cache", 60)

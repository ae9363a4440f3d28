"""The benchmark of the start of a run, and of its steps."""

import json
from pathlib import Path

import pytest

from benchmarks.start import Start, _steps, start

RUN = """
import json, sys, time
from pathlib import Path
out = Path(sys.argv[sys.argv.index("--out") + 1])
out.mkdir()
with open(out / "metrics.jsonl", "w") as file:
    for step in range(100):
        print(json.dumps({"step": step, "time/step": step, "memory/host_peak_gib": step / 2}), file=file, flush=True)
time.sleep(600)
"""


def checkout(directory: Path, program: str) -> Path:
    package = directory / "launch"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text(program)
    return directory


def test_a_step_has_ended_once_its_metrics_are_whole(tmp_path: Path):
    metrics = tmp_path / "metrics.jsonl"
    assert not _steps(metrics)
    first, evaluated = json.dumps({"step": 1}), json.dumps({"step": 0})
    for text, ended in ((f"{evaluated}\n", 0), (f"{evaluated}\n{first[:-3]}", 0), (f"{first}\n", 1)):
        metrics.write_text(text)
        assert len(_steps(metrics)) == ended


def test_steps_are_timed_from_the_second_on_and_the_run_is_ended(tmp_path: Path):
    timed: Start = start(checkout(tmp_path, RUN), ["some_recipe"], 3, tmp_path / "cache", 60)
    assert timed.steps == [2, 3] and timed.peak_gib == 1.5 and timed.seconds < 60


def test_a_run_that_ends_before_says_why(tmp_path: Path):
    program = "import sys; print(sys.argv[1]); raise SystemExit(2)"
    with pytest.raises(RuntimeError, match=r"(?s)0 of 1 steps after \d+ s in .*: some_recipe"):
        start(checkout(tmp_path, program), ["some_recipe"], 1, tmp_path / "cache", 60)

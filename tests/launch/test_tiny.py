"""The default job, unchanged: it learns, its draft is accepted, and its closing comparison shows a speed-up."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_tiny_learns_and_speculation_pays(tmp_path: Path):
    command = [sys.executable, "-m", "launch.train", "tiny", "--out", str(tmp_path / "run")]
    environment = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    before, after = map(float, re.search(r"accuracy: (\S+)% before RL, (\S+)% after", result.stdout).groups())  # pyright: ignore[reportOptionalMemberAccess]
    assert after - before >= 10
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(step["rollout/acceptance_length"] for step in steps[-5:]) / 5 >= 3.5
    events = [json.loads(line) for line in (tmp_path / "run" / "diary.jsonl").read_text().splitlines()]
    result = events[-1]["result"]
    # Their size depends on the machine's caches and arithmetic (benchmarks/results/tiny_cpu.txt).
    assert result["generation_speedup"] > 1.1 and result["step_speedup"] > 0.9

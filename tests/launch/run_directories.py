"""Run directories written by hand, for tests of reports."""

import json
from pathlib import Path
from typing import Any

from launch.run.metric_log import STANDARD_METRICS


def write_run(directory: Path, steps: int, **metrics: list[float | None]) -> Path:
    """Write a run with these metrics (`__` stands for a slash). All other metrics are null."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"name": "tiny", "seed": 3, "steps": steps}))
    given = {name.replace("__", "/"): values for name, values in metrics.items()}
    lines = [
        {"step": step} | dict.fromkeys(STANDARD_METRICS) | {name: values[step - 1] for name, values in given.items()}
        for step in range(1, steps + 1)
    ]
    write_lines(directory / "metrics.jsonl", lines)
    return directory


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))

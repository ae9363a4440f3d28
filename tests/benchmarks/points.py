"""A small point to simulate, and readers of options and answers, for tests."""

from collections.abc import Sequence

import pytest

from benchmarks.simulation.answer import Arm, answer, resolve_pair, run
from benchmarks.simulation.machine import Evidence
from benchmarks.simulation.options import SimulateArgs, with_run
from benchmarks.simulation.point import Point
from launch.cli.options import parse

NONE = Evidence()
SMALL = Point(sequences=32, mean_tokens=100.0, limit_tokens=400, prompt_tokens=20, gpus=4)


def read_options(*argv: str) -> tuple[SimulateArgs, Evidence]:
    return with_run(parse(SimulateArgs, argv, ""), argv)


def speedups(point: Point, evidence: Evidence = NONE) -> tuple[float, float]:
    found = answer(resolve_pair(point, evidence), evidence)
    return found.generation_speedup, found.step_speedup


def run_plain(point: Point, evidence: Evidence = NONE) -> Arm:
    return run(resolve_pair(point, evidence)[0], evidence)


def run_drafted(point: Point, evidence: Evidence = NONE) -> Arm:
    return run(resolve_pair(point, evidence)[1], evidence)


def check_table(lines: Sequence[str]) -> None:
    """Verify what a command prints of a step: values lie in their intervals, and parts add up to the step."""
    rows = {line[:24].strip(): line[24:].replace("[", "").replace("]", "").replace(",", "").split() for line in lines}
    for name in ("generation, s", "step, s"):
        values = [float(word) for word in rows[name]]
        for value, low, high in zip(*[iter(values)] * 3, strict=True):
            assert low <= value <= high
    parts = ("exposed generation", "log-probs", "training", "training the draft", "moving weights", "other")
    for arm, column in ((0, 0), (1, 3)):
        total = float(rows["step, s"][column])
        assert sum(float(rows[part][arm]) for part in parts) == pytest.approx(total, rel=0.01)

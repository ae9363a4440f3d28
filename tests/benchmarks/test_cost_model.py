"""The cost model meets the measured rounds of launch.bench as closely as is said."""

import re

from benchmarks.cost_model import RESULT, read, report
from launch.bench.presets import PRESETS

TEXT = RESULT.parents[1] / "cost_model_cpu.txt"


def test_the_result_is_that_of_this_code():
    lines = [*report(read(RESULT), PRESETS["25m"], "cpu")]
    assert TEXT.read_text(encoding="utf-8").splitlines()[-len(lines) :] == lines
    for subject in ("seconds, fitted", "cost in plain rounds", "lengths between two that were timed"):
        (line,) = (line for line in lines if line.startswith(subject))
        found = re.search(r"median +(\d+)%", line)
        assert found is not None and int(found[1]) <= 10
    # Each round is within its measured interval, or named in the last line.
    outside = [line.split() for line in lines if line.endswith("*")]
    named = lines[-1].partition(": ")[2].split(", ")
    assert named == [f"{slots} x {window} at {k}" for window, slots, k, *_ in outside]

"""The cost model meets the measured rounds of benchmarks.bench as closely as is said."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.bench.presets import PRESETS
from benchmarks.cost_model import RESULT, read, report, sheet_model

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


def test_rounds_of_a_block_draft_are_left_out(tmp_path: Path):
    result, path = json.loads(RESULT.read_text(encoding="utf-8")), tmp_path / "bench.json"
    rows = result["sections"]["draft"]["rows"]
    rows += [row | {"draft": "dspark", "k": 7} for row in rows]
    path.write_text(json.dumps(result))
    assert read(path) == read(RESULT)


def test_sheets_against_rounds_of_an_h100():
    """Plain rounds by (positions, rows), and costs in plain rounds by (rows, draft length); what misses is named."""
    text = RESULT.parents[1].joinpath("rounds_h100.txt").read_text(encoding="utf-8")
    model, errors = sheet_model(PRESETS["qwen3-8b"], "h100"), {}
    for context, rows, ms in re.findall(r"measured: context (\d+), batch (\d+), ms a round ([\d.]+)", text):
        modelled = 1e3 * float(model.seconds(int(rows), int(rows) * int(context), 0))
        errors[int(context), int(rows)] = modelled / float(ms) - 1
    assert {cell for cell, error in errors.items() if abs(error) > 0.08} == {(8192, 1)}
    assert errors[8192, 1] == pytest.approx(-0.40, abs=0.01)
    section = text.partition("cost of drafting")[2].partition("costs in plain rounds")[0]
    table = [line.split() for line in section.splitlines() if line.strip()[:4] == "1024"]
    rounds = {(int(rows), int(k)): float(re.findall(r"([\d.]+) \[", " ".join(rest))[2]) for _, rows, k, *rest in table}
    assert len(errors) == 5 and len(rounds) == 8
    for (rows, k), cost in rounds.items():
        plain, drafting = (float(model.seconds(rows, rows * 1024, length)) for length in (0, k))
        assert drafting / plain == pytest.approx(cost, rel=0.03 if rows == 1 else 0.105)

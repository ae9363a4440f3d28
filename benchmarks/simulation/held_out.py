"""How far off answers were, and how often their intervals held: from the results of benchmarks.simulator_validation."""

import json
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results" / "simulator_validation.json"


@cache
def results() -> dict[str, Any]:
    """Return the measured numbers with the answers of each engine."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def model_error(engine: str) -> float:
    """Return the relative error of rounds with drafts that nine of ten measured numbers stay below."""
    return results()["model_error"][engine]


def coverage(engine: str, cells: Sequence[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """Return (held, of) by group of sources: numbers inside the interval of an engine that was not fitted to them."""
    of, held = Counter[str](), Counter[str]()
    for cell in cells:
        _, low, high = cell["answers"][engine]
        of[cell["group"]] += engine not in cell["fitted"]
        held[cell["group"]] += engine not in cell["fitted"] and low <= cell["value"] <= high
    return {group: (held[group], of[group]) for group in of}


def coverage_line(engine: str) -> str:
    """Return the line that stands beside an answer."""
    counts = coverage(engine, results()["cells"]).items()
    held = ", ".join(f"{held} of {of} {group}" for group, (held, of) in counts)
    page = "benchmarks/simulator_validation/validation.md"
    return f"held out, its 90% intervals with engine {engine} held {held}: {page}"

"""Answers of benchmarks.simulate for measured numbers, with the errors of the model left out where it saw them."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from benchmarks.simulation.answer import resolve_pair
from benchmarks.simulation.estimate import EstimatedAnswer, estimate
from benchmarks.simulation.options import PROGRAM, SimulateArgs, given_ranges, with_run
from benchmarks.simulation.report import step_table
from benchmarks.simulation.uncertainty import LEVEL, Interval, input_ranges
from benchmarks.simulator_validation.cells import OWN, Cell
from launch.cli.options import parse
from specjax.cost import ENGINES

# Significant digits of the results, so that another machine's rounding changes nothing.
DIGITS = 4
# The cell whose command the page shows.
EXAMPLE = "Think, k = 5, DAPO"
# Lines of a step and its parts.
TABLE = 9
# Few samples give the value in the middle of the ranges.
FEWEST = 4


def answered(cell: Cell, engine: str, error: float, samples: int = SimulateArgs.samples) -> Interval:
    """Return what `benchmarks.simulate` says for a cell: the value, and its interval.

    error: of rounds with drafts, relative; the cell is not among those that it comes from.
    """
    words = [*cell.options.split(), "--engine", engine, "--samples", str(samples)]
    ranges = words.index("--ranges") + 1 if "--ranges" in words else len(words)
    words[ranges:ranges] = ["--ranges"] * (ranges == len(words)) + [f"drafted_factor={1 - error},{1 + error}"]
    found = _estimate(words)
    assert found.intervals is not None
    if cell.read == "ms":  # of one of two rounds
        return Interval(*(500 * seconds for seconds in found.intervals["plain_generation_s"]))
    if cell.read == "cost":
        value, low, high = found.intervals["generation_speedup"]
        return Interval(1 / value, 1 / high, 1 / low)
    return found.intervals[cell.read]


def model_errors(cells: Sequence[Cell]) -> dict[str, dict[Cell, float]]:
    """Return the relative error of the seconds of rounds with drafts, by engine, for the cells that are about it.

    They are our own rounds for `specjax`, and all others for `vllm-0.17`. A step does not say what its rounds took.
    """
    errors: dict[str, dict[Cell, float]] = {engine: {} for engine in ENGINES}
    for cell in cells:
        if cell.read in ("cost", "generation_speedup"):
            engine = "specjax" if cell.source == OWN else "vllm-0.17"
            ratio = answered(cell, engine, 0.0, FEWEST).value / cell.value
            errors[engine][cell] = abs((1 / ratio if cell.read == "cost" else ratio) - 1)
    return errors


def typical_error(errors: Mapping[Cell, float], without: Cell | None = None) -> float:
    """Return the half width of a uniform range, the middle LEVEL of which covers a share LEVEL of the cells' errors.

    It is at most 0.9.

    without: leaves out the cells of this cell's source; only the cell itself if all are of one source.
    """
    others = {cell: error for cell, error in errors.items() if without is None or cell.source != without.source}
    others = others or {cell: error for cell, error in errors.items() if cell != without}
    return min(float(np.quantile([*others.values()], LEVEL, method="higher")) / LEVEL, 0.9)


def results(cells: Sequence[Cell]) -> dict[str, Any]:
    """Return all answers as JSON, numbers rounded."""
    errors = model_errors(cells)
    (example,) = (cell for cell in cells if cell.name == EXAMPLE)
    return {
        "command": "python -m benchmarks.simulator_validation",
        "model_error": {engine: rounded([typical_error(found)])[0] for engine, found in errors.items()},
        "example": step_example(f"{example.options} --engine vllm-0.17"),
        "cells": [as_json(cell, errors) for cell in cells],
    }


def step_example(options: str) -> dict[str, Any]:
    """Return a command, and what it prints of a step and its parts."""
    lines = islice(step_table(_estimate(options.split())), TABLE)
    return {"command": f"{PROGRAM} {options}", "lines": [*lines]}


def _estimate(words: Sequence[str]) -> EstimatedAnswer:
    """Return the answer for a command line, by the functions by which the command answers."""
    args, evidence = with_run(parse(SimulateArgs, words, PROGRAM), words)
    ranges = input_ranges(args.point, evidence, given_ranges(args))
    return estimate({}, resolve_pair(args.point, evidence), evidence, ranges, args.samples)


def as_json(cell: Cell, errors: Mapping[str, Mapping[Cell, float]]) -> dict[str, Any]:
    """Return a cell with the answers of all engines."""
    answers = {engine: rounded(answered(cell, engine, typical_error(found, cell))) for engine, found in errors.items()}
    return cell._asdict() | {"value": rounded([cell.value])[0], "group": cell.group, "answers": answers}


def rounded(values: Iterable[float]) -> list[float]:
    """Return numbers with DIGITS significant digits."""
    return [float(f"{value:.{DIGITS}g}") for value in values]

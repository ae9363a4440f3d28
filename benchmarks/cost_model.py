"""Hold the cost model against the measured rounds of benchmarks.bench: fitted to them, and from sheets only.

Run from the repository's root: python -m benchmarks.cost_model
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from benchmarks.bench.presets import PRESETS, Preset
from models.sheets import decoder_sheet, eagle3_sheet
from specjax.cost import (
    HARDWARE,
    Cell,
    CostModel,
    Deployment,
    cost_model,
    find_hardware,
    fit,
    relative_errors,
    round_seconds,
)
from specjax.rollout.plan import Phase

RESULT = Path(__file__).parent / "results" / "bench_25m" / "bench.json"


class Measured(NamedTuple):
    """A measured round, and the interval of its cost in plain rounds.

    A plain round costs 1 by definition: its interval spans its seconds in the three sections that time it.
    """

    cell: Cell
    low: float
    high: float


def read(path: Path) -> list[Measured]:
    """Return the rounds of a result of benchmarks.bench with the sections floor, verify and draft."""
    sections, rounds = json.loads(path.read_text(encoding="utf-8"))["sections"], []
    tables = {
        name: {(row["context"], row["batch"]): row for row in sections[name]["rows"]} for name in ("floor", "verify")
    }
    for row in sections["draft"]["rows"]:
        if row.get("draft", "eagle3") != "eagle3":
            continue
        context, batch, plain = row["context"], row["batch"], row["plain ms"] / 1e3
        if not any(each.cell[:2] == (batch, context) for each in rounds):
            shape = context, batch
            times = tables["floor"][shape]["ms a round"], tables["verify"][shape]["T(1) ms"], row["plain ms"]
            low, high = (end / row["plain ms"] for end in (min(times), max(times)))
            rounds.append(Measured(Cell(batch, context, 0, plain), low, high))
        cost, low, high = row["whole round"]
        rounds.append(Measured(Cell(batch, context, row["k"], cost * plain), low, high))
    return rounds


def sheet_model(preset: Preset, hardware: str) -> CostModel:
    """Return the cost model of a preset from sheets only. hardware: name of a sheet."""
    stored = jnp.dtype(preset.decoder.dtype).itemsize
    deployment = Deployment(weight_bytes=stored, cache_bytes=stored)
    return cost_model(decoder_sheet(preset.decoder), eagle3_sheet(preset.head), find_hardware(hardware), deployment)


def costs(seconds: Sequence[float], cells: Sequence[Cell]) -> np.ndarray:
    """Return the cost of each round in plain rounds of its shape, from the seconds of all."""
    plain = {cell[:2]: each for cell, each in zip(cells, seconds, strict=True) if cell.draft_length == 0}
    return np.array([each / plain[cell[:2]] for cell, each in zip(cells, seconds, strict=True)])


def between(cells: Sequence[Cell]) -> np.ndarray:
    """Return relative errors of the lengths in between, in each shape known only at its shortest and longest."""
    lengths = sorted({cell.draft_length for cell in cells})
    ends = [cell for cell in cells if cell.draft_length in (lengths[0], lengths[-1])]
    phases = sorted({Phase(cell.slots, cell.window) for cell in cells})
    table = round_seconds(ends, phases, lengths)
    inside = [cell for cell in cells if cell not in ends]
    modelled = [table[phases.index(Phase(slots, window)), lengths.index(k)] for slots, window, k, *_ in inside]
    return np.array(modelled) / [cell.seconds for cell in inside] - 1


def summary(errors: np.ndarray) -> str:
    """Return the median and the largest absolute error, as text."""
    return f"median {np.median(np.abs(errors)):4.0%}, largest {np.abs(errors).max():4.0%}"


def report(measured: Sequence[Measured], preset: Preset, hardware: str) -> Iterator[str]:
    """Yield the lines of the report."""
    cells = [each.cell for each in measured]
    model, sheets = fit(cells), sheet_model(preset, hardware)
    errors, sheet_errors = relative_errors(model, cells), relative_errors(sheets, cells)
    seconds = [cell.seconds for cell in cells]
    actual, modelled = costs(seconds, cells), costs([*(seconds * (1 + errors))], cells)
    yield "constants, microseconds: " + ", ".join(f"{name} {1e6 * x:.3g}" for name, x in model.constants().items())
    yield "positions  rows  k  measured ms  model ms  error   cost  model  interval"
    outside: list[str] = []
    for i, (cell, low, high) in enumerate(measured):
        slots, window, k, *_ = cell
        # Of a plain round the seconds are compared, of others the cost in plain rounds.
        inside = low <= (modelled[i] if k else 1 + errors[i]) <= high
        outside += [] if inside else [f"{slots} x {window} at {k}"]
        yield (
            f"{window:9}  {slots:4}  {k}  {1e3 * cell.seconds:11.1f}  {1e3 * cell.seconds * (1 + errors[i]):8.1f}  "
            f"{errors[i]:+5.0%}  {actual[i]:5.2f}  {modelled[i]:5.2f}  [{low:.2f}, {high:.2f}]{'' if inside else ' *'}"
        )
    drafting = np.array([cell.draft_length > 0 for cell in cells])
    yield f"seconds, fitted:                      {summary(errors)}"
    yield f"cost in plain rounds, fitted:         {summary((modelled / actual - 1)[drafting])}"
    yield f"lengths between two that were timed:  {summary(between(cells))}"
    yield f"seconds, from sheets alone:           {summary(sheet_errors)}"
    yield f"* outside its interval, {len(outside)} of {len(cells)} (rows x positions): {', '.join(outside)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--result", type=Path, default=RESULT, help="JSON of benchmarks.bench")
    parser.add_argument("--hardware", choices=HARDWARE, default="cpu", help="sheet of the device that measured it")
    options = parser.parse_args()
    preset = json.loads(options.result.read_text(encoding="utf-8"))["preset"]
    print(*report(read(options.result), PRESETS[preset], options.hardware), sep="\n")


if __name__ == "__main__":
    main()

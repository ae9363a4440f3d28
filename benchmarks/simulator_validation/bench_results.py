"""Our own measurements: rounds, speed-ups and layouts of benchmarks.bench, for every result in benchmarks/results."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench.presets import PRESETS, Preset
from benchmarks.bench.rollout_timer import shrinking
from benchmarks.bench.sections.layout import DRAFTED, GROUP
from benchmarks.cost_model import between, costs, read, sheet_model
from benchmarks.simulation.acceptance import acceptance_length
from benchmarks.simulation.rollout import SlotLayout, simulate
from benchmarks.simulation.surface import Surface
from benchmarks.simulator_validation.cells import WIDE, Figure, PageSection
from specjax.cost import HARDWARE, CostModel, fit, relative_errors

RESULTS = Path(__file__).parents[1] / "results"
# Draws of the lengths of a layout: which rows are long is random.
DRAWS = 40


def sections() -> Iterator[PageSection]:
    """Yield a section for each result of benchmarks.bench that times drafts."""
    for path in sorted(RESULTS.glob("*/bench.json")):
        bench = json.loads(path.read_text(encoding="utf-8"))
        if {"floor", "verify", "draft"} <= set(bench["sections"]):
            yield _section(path, bench)


def _section(path: Path, bench: dict[str, Any]) -> PageSection:
    measured, preset = read(path), PRESETS[bench["preset"]]
    cells = [timed.cell for timed in measured]
    model = fit(cells)
    errors, seconds = relative_errors(model, cells), [cell.seconds for cell in cells]
    ratios, modelled = costs(seconds, cells), costs([*(seconds * (1 + errors))], cells)
    outside = [
        f"{cell.slots} x {cell.window} at {cell.draft_length}"
        for (cell, low, high), ratio, error in zip(measured, modelled, errors, strict=True)
        if not low <= (ratio if cell.draft_length else 1 + error) <= high
    ]
    wide = [
        f"{cell.slots} x {cell.window} at {cell.draft_length} ({error:+.0%})"
        for cell, error in zip(cells, errors, strict=True)
        if abs(error) > WIDE
    ]
    drafting = np.array([cell.draft_length > 0 for cell in cells])
    groups = {
        "seconds of a round": ("fitted", errors),
        "its cost in rounds without drafts": ("fitted", (modelled / ratios - 1)[drafting]),
        "draft lengths between two that were timed": ("predicted", between(cells)),
    }
    sheets = relative_errors(sheet_model(preset, _hardware(bench)), cells)
    groups["seconds of a round, from sheets alone"] = ("predicted", sheets)
    rows = [
        [name, kind, f"{np.median(np.abs(offsets)):.0%}", f"{np.abs(offsets).max():.0%}", str(len(offsets))]
        for name, (kind, offsets) in groups.items()
    ]
    where = path.relative_to(RESULTS.parents[1])
    notes = [
        f"Fitted to the {len(cells)} rounds that `{where}` times. The median error of the cost of a round is promised "
        "to be at most 10%.",
        f"{len(outside)} of {len(cells)} rounds are outside their measured intervals (rows x positions at k): "
        + ", ".join(outside)
        + ".",
        f"Their seconds are off by more than {WIDE:.0%} at: {', '.join(wide) or 'none'}.",
    ]
    median = float(np.median(np.abs(modelled / ratios - 1)[drafting]))
    promised = Figure("median error of the cost of a round", None, median, "fitted", low=0.0, high=0.10)
    others = [*_speedups(bench, model, preset), *_layouts(bench, model, preset)]
    table = ["rounds", "kind", "median error", "largest", "cells"], rows
    title = f"Our own: benchmarks.bench, preset {bench['preset']}"
    return PageSection(title, f"`{where}`", notes, [promised, *others], [table])


def _hardware(bench: dict[str, Any]) -> str:
    """Return the sheet of the device that a result names, the CPU's if it names none."""
    provenance = " ".join(bench["provenance"]).lower()
    return next((name for name in sorted(HARDWARE, key=len, reverse=True) if name in provenance), "cpu")


def _speedups(bench: dict[str, Any], model: CostModel, preset: Preset) -> Iterator[Figure]:
    """Yield the speed-ups of whole completions at forced acceptance, which the rounds were not fitted to."""
    for row in bench["sections"].get("acceptance", {"rows": []})["rows"]:
        if "speed-up" not in row:
            continue
        positions = preset.batch * (preset.prompt + preset.new)
        plain, drafted = (float(model.seconds(preset.batch, positions, k)) for k in (0, row["k"]))
        value, low, high = row["speed-up"]
        name = f"speed-up at k = {row['k']}, acceptance {row['rate']}"
        yield Figure(name, value, row["alpha"] * plain / drafted, "predicted", measured=(low, high))


def _layouts(bench: dict[str, Any], model: CostModel, preset: Preset) -> Iterator[Figure]:
    """Yield the speed-ups of phases and of the queue, from simulated rollouts with lengths drawn as the bench's."""
    rows = {row["what"]: row for row in bench["sections"].get("layout", {"rows": []})["rows"] if "speed-up" in row}
    count, slots, window = GROUP * preset.batch, preset.batch, preset.prompt + preset.tail.longest
    gain = float(acceptance_length(preset.peer_rate, DRAFTED, decay=1.0))
    surface = Surface(lambda n, _, k: model.seconds(n, n * window, k), count, window, (DRAFTED,))

    def seconds(lengths: np.ndarray, layout: SlotLayout) -> float:
        rollout = simulate(lengths, np.full((1, *lengths.shape), gain), surface, layout, preset.prompt)
        return float(rollout.ended.max(1).sum())

    rng = np.random.default_rng(0)
    phases, queue = [], []
    for _ in range(DRAWS):
        near = preset.tail.median * rng.uniform(0.5, 1.5, count)
        lengths = np.where(rng.random(count) < 1 / preset.tail.every, preset.tail.longest, near)[None]
        one_phase = seconds(lengths, SlotLayout(count, (count,)))
        phases.append(one_phase / seconds(lengths, SlotLayout(count, tuple(size for size, _ in shrinking(count)))))
        batches = seconds(lengths.reshape(GROUP, slots), SlotLayout(slots, (slots,)))
        queue.append(batches / seconds(lengths, SlotLayout(slots, (slots,))))
    for what, values in {"phases": phases, "queue": queue}.items():
        if what in rows:
            low, high = np.quantile(values, [0.05, 0.95])
            value, *measured = rows[what]["speed-up"]
            why = f"the lengths drawn; 90% of draws: {low:.2f} to {high:.2f}, no promise"
            middle = float(np.median(values))
            yield Figure(f"layout: {what}", value, middle, "assumed", why=why, measured=tuple(measured))

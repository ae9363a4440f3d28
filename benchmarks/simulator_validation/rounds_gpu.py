"""Rounds of specjax itself on a GPU, against sheets only: nothing is fitted."""

import re
from collections.abc import Iterator

from benchmarks.simulator_validation.bench_results import RESULTS
from benchmarks.simulator_validation.cells import Figure, PageSection, rows_of
from benchmarks.simulator_validation.published import ROOFLINE, cost, model_of, plain_ms

FILE = RESULTS / "rounds_h100.txt"
MODEL, HARDWARE = "qwen3-8b", "h100"
_PLAIN = re.compile(r"measured: context (\d+), batch (\d+), ms a round ([\d.]+)")
_DRAFTED = re.compile(
    r"^ +(\d+) +(\d+) +(\d+) +([\d.]+) +\S+ \[.*?\] +\S+ \[.*?\] +(\S+) \[(\S+), (\S+)\]", re.MULTILINE
)


def section() -> PageSection:
    """Return the cells of the file's rounds."""
    notes = [
        "From the sheet of an H100 and the shapes of Qwen3-8B; shares of bandwidth and peak and the latency of a layer "
        "are those of the roofline everywhere, not measured there. Costs of rounds with drafts are in rounds "
        "without, as measured in turns with them.",
    ]
    where = f"`{FILE.relative_to(RESULTS.parents[1])}`, benchmarks.bench, jax 0.11.2"
    return PageSection("Our own: Qwen3-8B on an H100", where, notes, [*_cells(FILE.read_text(encoding="utf-8"))])


def _cells(text: str) -> Iterator[Figure]:
    round_costs = model_of(MODEL, HARDWARE, ROOFLINE)
    for line in _PLAIN.finditer(text):
        positions, rows = int(line[1]), int(line[2])
        name = f"{rows_of(rows)}, {positions:,} positions: ms without drafts"
        yield Figure(name, float(line[3]), plain_ms(round_costs, rows, positions), "predicted")
    for line in _DRAFTED.finditer(text):
        positions, rows, k = int(line[1]), int(line[2]), int(line[3])
        name = f"{rows_of(rows)}, {positions:,} positions, k = {k}: cost"
        measured = float(line[6]), float(line[7])
        yield Figure(name, float(line[5]), cost(round_costs, rows, k, positions), "predicted", measured=measured)

"""The validation page, as Markdown."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.simulation.held_out import coverage
from specjax.cost import ENGINES

PAGE = Path(__file__).with_name("validation.md")
READ = {
    "generation_speedup": "speed-up of generation",
    "step_speedup": "speed-up of a step",
    "cost": "a round with drafts, in rounds without",
    "ms": "a round without drafts, ms",
}
INTRODUCTION = """# The simulator against measured numbers

Every measured number that a command line of `benchmarks.simulate` ([simulator.md](../../docs/simulator.md)) can ask
for, beside what it answers. Written by `python -m benchmarks.simulator_validation`, which asks through the same
function as the command; do not edit it. A test asks again. The line about held-out numbers beside each answer is read
from the same results, `benchmarks/results/simulator_validation.json`.

An answer is the value in the middle of the ranges of its inputs, and its 90% interval. One of these inputs,
`drafted_factor`, is how far off rounds with drafts were: the error that nine of ten measured numbers stay below. For
the engine `specjax` they are our own rounds, for `vllm-0.17` all others. **Held out** means: this error comes from the
numbers of other sources, or where there is one source, from its other numbers; and numbers from which constants come do
not count.
Two numbers of vLLM 0.17 give `vllm-0.17` its draft pass and its attention, and one of its steps follows from them. The
rounds without drafts of 1 to 64 rows on our H100 give the share of computing that reading weights hides.

What a source does not publish is assumed: rows, limits and spreads of arXiv 2604.26779, with mean lengths at which
generation without drafts takes the published seconds (with `vllm-0.17`); 1,024 positions of a row in rounds; acceptance
lengths 2.79 of EAGLE-3 and 2.5 at k = 3 of NVIDIA's cohort. Both engines are asked for all numbers, although neither
claims the rounds of the other. No whole step of `specjax` on a GPU has been measured, so that its answers for steps
rest on these rounds.

The engine profile comes from one model on one GPU, and where engines draft faster (AngelSlim's vLLM on an H20, NVIDIA's
cohort) or attend over long caches (8,192 positions of one row), answers miss. Older comparisons, with explanations that
are no longer in the code, are in [validation_2026_11_28.md](validation_2026_11_28.md).
"""


def page(found: dict[str, Any]) -> str:
    """Return the page of these results."""
    cells = found["cells"]
    lines = [INTRODUCTION, *_coverage(cells), "", *_errors(found["model_error"]), "", *_example(found["example"])]
    for source, group in groupby(cells, lambda cell: cell["source"]):
        members = [*group]
        lines += ["", f"## {source}", "", f"First command: `python -m benchmarks.simulate {members[0]['options']}`"]
        lines += ["", *_table(("what", "", "measured", *ENGINES), [_row(cell) for cell in members])]
    return "\n".join(lines) + "\n"


def _coverage(cells: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the table of how many numbers each engine's intervals held, by source, those left out that it saw."""
    sources = list(dict.fromkeys(cell["source"] for cell in cells))
    rows = []
    for source in sources:
        members = [cell | {"group": source} for cell in cells if cell["source"] == source]
        counts = ("{} of {}".format(*coverage(engine, members)[source]) for engine in ENGINES)
        rows.append([source, *counts])
    return _table(("held out, inside the 90% interval", *ENGINES), rows)


def _errors(errors: dict[str, float]) -> Iterator[str]:
    names = " and ".join(f"{error:.0%} with `{engine}`" for engine, error in errors.items())
    yield f"Answers add the range of that error to their inputs (`drafted_factor`): {names}."


def _example(example: dict[str, Any]) -> Iterator[str]:
    yield "Drafts slowed generation down to 0.84 in RL-Think at k = 5. The answer does not exclude it:"
    yield from ("", "```bash", example["command"], "```", "", "```", *example["lines"], "```")


def _row(cell: dict[str, Any]) -> list[str]:
    shown = [cell["name"], READ[cell["read"]], f"{cell['value']:.3g}"]
    for engine, (value, low, high) in cell["answers"].items():
        note = " (fitted)" if engine in cell["fitted"] else "" if low <= cell["value"] <= high else " **outside**"
        shown.append(f"{value:.3g} [{low:.3g}, {high:.3g}]{note}")
    return shown


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield "|---" * len(header) + "|"
    yield from (f"| {' | '.join(row)} |" for row in rows)

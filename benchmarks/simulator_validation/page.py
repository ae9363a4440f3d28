"""The validation page, as Markdown, and its results as JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.simulator_validation.cells import Cell, Section
from benchmarks.simulator_validation.others import UNPREDICTABLE

COMMAND = "python -m benchmarks.simulator_validation"
# Significant digits of the results, so that another machine's rounding changes nothing.
DIGITS = 4
INTRODUCTION = f"""# The simulator against published numbers

Every published number that we know of, beside what the simulator ([simulator.md](simulator.md)) makes of it. Written by
`{COMMAND}`; do not edit it. A test computes it again and compares.

| kind | meaning |
|---|---|
| fitted | the model's constants come from this number, so that agreement proves nothing |
| predicted | they do not |
| assumed | predicted, with an input that was not published |
| unpredictable | an input is missing, or no mechanism is known |

Where a bound or a band is given, it is promised, and the last column says whether the promise holds. Other errors are
as large as they are.
"""


def results(sections: Sequence[Section]) -> dict[str, Any]:
    """Return the sections as JSON, numbers rounded."""
    return _rounded({"command": COMMAND, "sections": [asdict(section) for section in sections]})


def page(found: dict[str, Any]) -> str:
    """Return the page of these results."""
    sections = [
        Section(**section | {"cells": [Cell(**cell) for cell in section["cells"]]}) for section in found["sections"]
    ]
    lines = [INTRODUCTION, *_summary(sections)]
    for section in sections:
        lines += ["", f"## {section.title}", "", f"Source: {section.source}."]
        for note in section.notes:
            lines += ["", note]
        if section.cells:
            lines += ["", *_cells(section.cells)]
        for header, rows in section.tables:
            lines += ["", *_table(header, rows)]
    lines += ["", "## Not predictable", "", "Published, and without a model here.", ""]
    lines += [*_table(("what", "published", "why not"), UNPREDICTABLE)]
    return "\n".join(lines) + "\n"


def _summary(sections: Sequence[Section]) -> Iterator[str]:
    promised = [(section, cell) for section in sections for cell in section.cells if _promise(cell)]
    failed = [(section, cell) for section, cell in promised if cell.failed]
    yield f"{len(promised)} cells have a promise; {len(failed)} of them break it{':' if failed else '.'}"
    yield ""
    yield from (f"- {section.title}: {cell.name}" for section, cell in failed)
    wide = [
        (section, cell)
        for section in sections
        for cell in section.cells
        if not _promise(cell) and cell.kind in ("predicted", "assumed") and abs(cell.error or 0) > 0.25
    ]
    yield ("\n" if failed else "") + f"{len(wide)} cells without a promise are off by more than a quarter:"
    yield ""
    for title in dict.fromkeys(section.title for section, _ in wide):
        errors = [cell.error for section, cell in wide if section.title == title and cell.error is not None]
        yield f"- {title}: {len(errors)}, from {min(errors):+.0%} to {max(errors):+.0%}"


def _cells(cells: Sequence[Cell]) -> Iterator[str]:
    """Yield the lines of a table of cells."""
    rows = []
    for cell in cells:
        published = "" if cell.published is None else f"{cell.published:.4g}"
        if cell.measured is not None:
            published += f" [{cell.measured[0]:.3g}, {cell.measured[1]:.3g}]"
        error = "" if cell.error is None else f"{cell.error:+.1%}"
        model = "" if cell.model is None else f"{cell.model:.3g}"
        kind = f"{cell.kind}: {cell.why}" if cell.why else cell.kind
        holds = ("fails" if cell.failed else "holds") if _promise(cell) else ""
        rows.append([cell.name, published, model, error, kind, _promise(cell), holds])
    return _table(("what", "published", "model", "error", "kind", "promised", ""), rows)


def _promise(cell: Cell) -> str:
    if cell.low is not None and cell.high is not None:
        return f"{cell.low:.2f} .. {cell.high:.2f}"
    return "" if cell.bound is None or cell.published is None else f"within {cell.bound:.0%}"


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield "|---" * len(header) + "|"
    yield from (f"| {' | '.join(map(str, row))} |" for row in rows)


def _rounded(value: Any) -> Any:
    match value:
        case float():
            return float(f"{value:.{DIGITS}g}")
        case dict():
            return {name: _rounded(each) for name, each in value.items()}
        case list() | tuple():
            return [_rounded(each) for each in value]
    return value

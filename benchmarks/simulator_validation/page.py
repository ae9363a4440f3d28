"""The validation page, as Markdown, and its results as JSON."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.simulator_validation.cells import WIDE, Figure, PageSection
from benchmarks.simulator_validation.published import UNPREDICTABLE

COMMAND = "python -m benchmarks.simulator_validation"
# Significant digits of the results, so that another machine's rounding changes nothing.
DIGITS = 4
INTRODUCTION = f"""# The simulator against published numbers

Every published number that we know of, beside what the simulator ([simulator.md](simulator.md)) makes of it. Written by
`{COMMAND}`; do not edit it. A test computes it again and compares.

| kind | meaning |
|---|---|
| fitted | the model's constants come from this number, so that agreement proves nothing |
| predicted | they do not, and every input of the case was published |
| assumed | an input was not published, or was chosen because it agrees, or published parts of the same run are given |
| unpredictable | an input is missing, or no mechanism is known |

Where a bound or a band is given, it is promised, and the last column says whether the promise holds. An error with
"outside" lies outside the interval that was measured. Tables of rivals and of shardings have further errors.
"""


def results(sections: Sequence[PageSection]) -> dict[str, Any]:
    """Return the sections as JSON, numbers rounded."""
    return _rounded({"command": COMMAND, "sections": [asdict(section) for section in sections]})


def page(validation: dict[str, Any]) -> str:
    """Return the page of these results."""
    sections = [
        PageSection(**section | {"cells": [Figure(**cell) for cell in section["cells"]]})
        for section in validation["sections"]
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


def _summary(sections: Sequence[PageSection]) -> Iterator[str]:
    promised = [(section, cell) for section in sections for cell in section.cells if _promise(cell)]
    failed = [(section, cell) for section, cell in promised if cell.failed]
    yield f"{len(promised)} cells have a promise; {len(failed)} of them break it{':' if failed else '.'}"
    if failed:
        yield from ("", *(f"- {section.title}: {cell.name}" for section, cell in failed))
    yield from _list("What the model does not reach", [line for section in sections for line in section.failures])
    wide = _lines(sections, lambda cell: abs(cell.error or 0) > WIDE, lambda cell: f"{cell.name} ({cell.error:+.0%})")
    yield from _list(f"Cells that are off by more than {WIDE:.0%}, with a promise or without", wide)
    outside = _lines(sections, lambda cell: cell.outside, lambda cell: cell.name)
    yield from _list("Cells that are outside their measured interval", outside)


def _list(title: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield from ("", f"{title}:", "", *(f"- {line}" for line in lines))


def _lines(
    sections: Sequence[PageSection], condition: Callable[[Figure], bool], name: Callable[[Figure], str]
) -> list[str]:
    """Return a line for each section with such cells: how many of how many, and which."""
    lines = []
    for section in sections:
        names = [name(cell) for cell in section.cells if condition(cell)]
        if names:
            lines.append(f"{section.title}: {len(names)} of {len(section.cells)}: {'; '.join(names)}")
    return lines


def _cells(cells: Sequence[Figure]) -> Iterator[str]:
    """Yield the lines of a table of cells."""
    rows = []
    for cell in cells:
        published = "" if cell.published is None else f"{cell.published:.4g}"
        if cell.measured is not None:
            published += f" [{cell.measured[0]:.3g}, {cell.measured[1]:.3g}]"
        error = "" if cell.error is None else f"{cell.error:+.1%}"
        error += ", outside" if cell.outside else ""
        model = "" if cell.model is None else f"{cell.model:.3g}"
        kind = f"{cell.kind}: {cell.why}" if cell.why else cell.kind
        holds = ("fails" if cell.failed else "holds") if _promise(cell) else ""
        rows.append([cell.name, published, model, error, kind, _promise(cell), holds])
    return _table(("what", "published", "model", "error", "kind", "promised", ""), rows)


def _promise(cell: Figure) -> str:
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
            return {name: _rounded(entry) for name, entry in value.items()}
        case list() | tuple():
            return [_rounded(entry) for entry in value]
    return value

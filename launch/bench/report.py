"""Results of the bench's sections, as tables and as JSON."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from rich.console import Console
from rich.table import Column, Table

from launch.timing import format_provenance, interval

Value = str | int | float | tuple[float, float, float] | None
Row = Mapping[str, Value]
NO_ROOM = "-: does not fit in the device's memory"


@dataclass(frozen=True)
class Section:
    """Results of a section as a table.

    title: caption.
    rows:  values by column. A tuple is (median, low, high) of a 95% interval; None or a missing column: not measured.
    notes: lines below the table.
    """

    title: str
    rows: Sequence[Row]
    notes: Sequence[str] = ()


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[float, float, float]:
    """Return (median, low, high) of the ratios of paired measurements; low and high bound the 95% interval."""
    return interval([a / b for a, b in zip(numerators, denominators, strict=True)])


def where_it_fits(cell: Row, measure: Callable[[], Sequence[Row]]) -> list[Row]:
    """Return the rows of `measure`, each with the columns of `cell`; only `cell` if the device runs out of memory."""
    try:
        return [{**cell, **row} for row in measure()]
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
    return [cell]


def print_section(section: Section, console: Console) -> None:
    """Print the section's table and its notes."""
    # A row that did not fit in memory lacks columns.
    names = max(section.rows, key=len)
    columns = (Column(name, justify="right", no_wrap=True) for name in names)
    table = Table(*columns, title=section.title, title_justify="left", box=None, padding=(0, 0, 0, 2))
    for row in section.rows:
        table.add_row(*(_show(row.get(name)) for name in names))
    console.print(table)
    for note in section.notes:
        console.print(f"  {note}")
    console.print()


def as_json(preset: str, sections: Mapping[str, Section]) -> dict[str, Any]:
    """Return {"preset", "provenance": [lines], "sections": {name: {"title", "rows": [{column: value}], "notes"}}}."""
    return {
        "preset": preset,
        "provenance": format_provenance("launch.bench").splitlines(),
        "sections": {name: vars(section) for name, section in sections.items()},
    }


def _show(value: Value) -> str:
    match value:
        case None:
            return "-"
        case float():
            return _number(value)
        case (median, low, high):
            return f"{_number(median)} [{_number(low)}, {_number(high)}]"
        case _:
            return str(value)


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"

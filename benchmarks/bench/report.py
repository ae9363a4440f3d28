"""Results of the bench's sections, as tables and as JSON."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Column, Table

from launch.timing import format_provenance, interval

Value = str | int | float | tuple[float, float, float] | None
Row = Mapping[str, Value]
# Width of the widest table. A narrower terminal wraps its lines, so that no number is cut off.
WIDTH = 200
NO_ROOM = "-: does not fit in the device's memory"


@dataclass(frozen=True)
class BenchSection:
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
    """Return the rows of `measure`, each with the columns of `cell`; only `cell` if the device runs out of memory.

    The rows are logged to stderr, so that a section that is killed leaves what it has measured.
    """
    rows: list[Row]
    try:
        rows = [{**cell, **row} for row in measure()]
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        rows = [cell]
    for row in rows:
        print("measured:", ", ".join(f"{name} {_show(value)}" for name, value in row.items()), file=sys.stderr)
    return rows


class Results:
    """Sections of a program, each printed and written to the JSON file as soon as it is measured.

    The file holds {"preset", "provenance": [lines], "sections": {name: {"title", "rows": [{column: value}], "notes"}}}.
    """

    def __init__(self, program: str, preset: str, file: Path | None) -> None:
        """Print the provenance. file: None writes no JSON."""
        self.console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False, width=WIDTH)
        self.sections: dict[str, BenchSection] = {}
        self._file, provenance = file, format_provenance(program)
        self._head = {"preset": preset, "provenance": provenance.splitlines()}
        self.console.print(f"{provenance}\npreset    {preset}\n")

    def add(self, name: str, section: BenchSection) -> None:
        """Print the section and write it with all earlier ones."""
        self.sections[name] = section
        print_section(section, self.console)
        if self._file is not None:
            sections = {name: vars(section) for name, section in self.sections.items()}
            self._file.write_text(json.dumps(self._head | {"sections": sections}, indent=2) + "\n", encoding="utf-8")


def print_section(section: BenchSection, console: Console) -> None:
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

"""Results of the bench's sections, as tables and as JSON."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Column, Table

from launch.cli.paths import write_results
from launch.timing import format_provenance, interval

Value = str | int | float | Sequence[float] | None
Row = Mapping[str, Value]
# Columns that begin so hold the raw turns of a measurement. Only the file shows them.
RAW = "turns"
# Width of the widest table. A narrower terminal wraps its lines, so that no number is cut off.
WIDTH = 200
NO_ROOM = "-: does not fit in the device's memory"


@dataclass(frozen=True)
class BenchSection:
    """Results of a section as a table.

    title: caption.
    rows:  values by column. Three numbers are (median, low, high) of a 95% interval; None or a missing column: not
           measured. Columns that begin with RAW hold any number.
    notes: lines below the table.
    """

    title: str
    rows: Sequence[Row]
    notes: Sequence[str] = ()


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[float, float, float]:
    """Return (median, low, high) of the ratios of paired measurements; low and high bound the 95% interval."""
    return interval([a / b for a, b in zip(numerators, denominators, strict=True)])


def where_it_fits(cell: Row, measure: Callable[[], Iterable[Sequence[Row]]]) -> Iterator[list[Row]]:
    """Yield the rows of `measure` after each turn, each with the columns of `cell`.

    If the device runs out of memory, the rows of the turns before stay, without any only `cell`.
    """
    rows: list[Row] = [cell]
    try:
        for measured in measure():
            rows = [{**cell, **row} for row in measured]
            yield rows
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        yield rows
    for row in rows:
        shown = (f"{name} {_show(value)}" for name, value in row.items() if not name.startswith(RAW))
        print("measured:", ", ".join(shown), file=sys.stderr)


def cell_by_cell(cells: Iterable[Iterable[Sequence[Row]]]) -> Iterator[list[Row]]:
    """Yield all rows so far after each turn. cells: for each cell, its rows after each of its turns."""
    before = list[Row]()
    for turns in cells:
        rows: Sequence[Row] = ()
        for rows in turns:
            yield [*before, *rows]
        before += rows


class Results:
    """Sections of a program, each written to the JSON file after every turn, and printed when it is measured.

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
        self.follow(name, [section])

    def follow(self, name: str, states: Iterable[BenchSection]) -> None:
        """Write the section with all earlier ones after each turn, and print it at the end, also if an error ends it.

        states: the section after each turn.
        """
        try:
            for self.sections[name] in states:
                sections = {name: vars(section) for name, section in self.sections.items()}
                write_results(self._file, self._head | {"sections": sections})
        finally:
            if name in self.sections:
                print_section(self.sections[name], self.console)


def print_section(section: BenchSection, console: Console) -> None:
    """Print the section's table and its notes."""
    # A row that did not fit in memory lacks columns.
    names = [name for name in max(section.rows, key=len) if not name.startswith(RAW)]
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
            return _number(median) + f" [{_number(low)}, {_number(high)}]" * (low < high)
        case _:
            return str(value)


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"

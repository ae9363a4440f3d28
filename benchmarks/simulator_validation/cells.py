"""Cells of the validation page: a published number beside the model's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

# fitted: the model's constants come from this cell. predicted: they do not, and every input was published.
# assumed: an input was not published, or was chosen because it agrees, or published parts of the same run are given.
# unpredictable: an input is missing, or no mechanism is known.
Kind = Literal["fitted", "predicted", "assumed", "unpredictable"]

# Relative errors above this one are listed.
WIDE = 0.25


@dataclass(frozen=True)
class Figure:
    """A published number and the model's.

    Attributes:
        name:      What was measured.
        published: The number; None for one that only the model gives.
        model:     The model's number; None if there is none.
        kind:      How the model came to it.
        bound:     Largest relative error that is promised; None: nothing is promised.
        low, high: Band of the model, or of several models, in place of a bound: the number must lie within.
        why:       Why it cannot be predicted, or what was assumed.
        measured:  Interval of the published number, where there is one.
    """

    name: str
    published: float | None
    model: float | None
    kind: Kind
    bound: float | None = None
    low: float | None = None
    high: float | None = None
    why: str = ""
    measured: tuple[float, float] | None = None

    @property
    def error(self) -> float | None:
        """Relative error of the model; None without one of both numbers."""
        if self.published is None or self.model is None:
            return None
        return self.model / self.published - 1

    @property
    def outside(self) -> bool:
        """True if the model lies outside the measured interval."""
        if self.measured is None or self.model is None:
            return False
        return not self.measured[0] <= self.model <= self.measured[1]

    @property
    def failed(self) -> bool:
        """True if a promise about the cell is broken."""
        if self.low is not None and self.high is not None and self.published is not None:
            return not self.low <= self.published <= self.high
        return self.bound is not None and self.error is not None and abs(self.error) > self.bound


def rows_of(rows: int) -> str:
    """Return a number of rows in words."""
    return "1 row" if rows == 1 else f"{rows} rows"


@dataclass(frozen=True)
class PageSection:
    """Cells from one source.

    Attributes:
        title:  Heading.
        source: Where the numbers were published.
        notes:  Paragraphs above the table.
        cells:  The table.
        tables: Further tables, each a header and rows.
        failures: Sentences about what the model does not reach, beside the cells.
    """

    title: str
    source: str
    notes: Sequence[str]
    cells: Sequence[Figure]
    tables: Sequence[tuple[Sequence[str], Sequence[Sequence[Any]]]] = ()
    failures: Sequence[str] = ()

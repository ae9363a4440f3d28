"""Seconds of rounds, tabulated: a simulation asks for many rounds, and a cost model answers one at a time."""

from collections.abc import Callable, Sequence

import numpy as np

# (rows decoded together, positions that each sees, draft length) -> seconds.
RoundSeconds = Callable[[int, float, int], float]
# Rows are tabulated one by one up to EVERY, then in steps of a sixth.
EVERY, _RATIO, _POSITIONS = 12, 7 / 6, 9


class Surface:
    """Seconds of a round by rows, positions and draft length; linear between the tabulated ones."""

    def __init__(self, seconds: RoundSeconds, rows: int, positions: float, draft_lengths: Sequence[int]) -> None:
        """Tabulate up to `rows` rows that see up to `positions` positions."""
        grid = [*range(1, min(rows, EVERY) + 1)]
        while grid[-1] < rows:
            grid.append(min(rows, int(np.ceil(grid[-1] * _RATIO))))
        self.draft_lengths = tuple(draft_lengths)
        self._rows, self._positions = np.array(grid, np.float64), np.linspace(0.0, positions, _POSITIONS)
        self._table = np.array(
            [[[seconds(n, float(s), k) for s in self._positions] for n in grid] for k in self.draft_lengths]
        )

    def __call__(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return float64 [draft lengths, n] for rows [n] and positions [n]."""
        i, u = _locate(self._rows, rows)
        j, v = _locate(self._positions, positions)
        table = self._table
        low = table[:, i, j] * (1 - v) + table[:, i, j + 1] * v
        i = np.minimum(i + 1, len(self._rows) - 1)
        high = table[:, i, j] * (1 - v) + table[:, i, j + 1] * v
        return low * (1 - u) + high * u


def _locate(grid: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the index of the last grid point not above each value, and the fraction of the way to the next one."""
    last = max(len(grid) - 2, 0)
    index = np.clip(np.searchsorted(grid, values, side="right") - 1, 0, last)
    if len(grid) == 1:
        return index, np.zeros(len(values))
    return index, np.clip((values - grid[index]) / (grid[index + 1] - grid[index]), 0.0, 1.0)

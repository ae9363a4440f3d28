"""Seconds of rounds, tabulated, so that a simulation looks up all replicas and draft lengths at once."""

from collections.abc import Callable, Sequence

import numpy as np

# (rows that decode together, cached positions of all of them together, draft length) -> seconds.
RoundSeconds = Callable[[np.ndarray, np.ndarray, int], np.ndarray | float]
# Rows are tabulated one by one up to EVERY, then in steps of a sixteenth.
EVERY, _RATIO, _POSITIONS = 512, 17 / 16, 9


class Surface:
    """Seconds of a round by rows, positions and draft length; linear between the tabulated ones."""

    def __init__(self, seconds: RoundSeconds, rows: int, positions: float, draft_lengths: Sequence[int]) -> None:
        """Tabulate up to `rows` rows that hold up to `positions` positions each."""
        grid = [*range(1, min(rows, EVERY) + 1)]
        while grid[-1] < rows:
            grid.append(min(rows, int(np.ceil(grid[-1] * _RATIO))))
        self.draft_lengths = tuple(draft_lengths)
        self._rows, self._positions = np.array(grid, np.float64), np.linspace(0.0, positions, _POSITIONS)
        n, cached = self._rows[:, None], self._rows[:, None] * self._positions
        self._table = np.stack([np.broadcast_to(seconds(n, cached, k), cached.shape) for k in self.draft_lengths])

    def __call__(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return float64 [draft lengths, n] for rows [n] that hold so many positions [n] on average."""
        return self.of_rows(rows)(positions)

    def of_rows(self, rows: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        """Return the function of positions for these rows."""
        i, u = _locate(self._rows, rows)
        table, above = self._table, np.minimum(i + 1, len(self._rows) - 1)
        u, every = u[:, None], np.arange(len(rows))
        by_position = table[:, i] * (1 - u) + table[:, above] * u

        def seconds(positions: np.ndarray) -> np.ndarray:
            j, v = _locate(self._positions, positions)
            return by_position[:, every, j] * (1 - v) + by_position[:, every, j + 1] * v

        return seconds


def _locate(grid: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the index of the last grid point not above each value, and the fraction of the way to the next one."""
    # np.clip takes several times as long for arrays this short, and simulations spend most of their time here.
    index = np.minimum(np.maximum(grid.searchsorted(values, side="right") - 1, 0), max(len(grid) - 2, 0))
    low = grid[index]
    span = grid[np.minimum(index + 1, len(grid) - 1)] - low
    return index, np.minimum(np.maximum((values - low) / np.where(span > 0, span, 1.0), 0.0), 1.0)

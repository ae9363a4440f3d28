"""Series of a chart: smoothed, interrupted where nothing was measured, and thinned to what a chart can show."""

from dataclasses import dataclass

import numpy as np

# Points that one line is drawn with, at most about twice as many where it is noisy.
MOST = 240
# Of a line's points, over how many the mean is taken.
SMOOTHED = 50
# Fewer points than this are drawn as they are.
FEW = 30
# Times the distance of the quartiles.
OUTLYING = 5


@dataclass(frozen=True)
class Series:
    """Finite values at ascending steps. color: 1 .. 6 of the palette. dashed: a bound, a prediction, a 7th line."""

    label: str
    steps: np.ndarray
    values: np.ndarray
    color: int
    dashed: bool = False

    @property
    def noisy(self) -> bool:
        """Return whether a mean is drawn over the values."""
        return len(self.values) > FEW

    @property
    def smooth(self) -> np.ndarray:
        """Return a running mean with outliers clipped; the values themselves if they are few."""
        if not self.noisy:
            return self.values
        half = max(len(self.values) // SMOOTHED // 2, 1)
        usual = np.clip(self.values, *usual_range(self.values))
        # Twice: once leaves the edges of what it is taken over.
        return _mean_around(_mean_around(usual, half), half)


def usual_range(values: np.ndarray) -> tuple[float, float]:
    """Return the least and the greatest value without outliers, which lie far outside the middle half."""
    low, high = np.quantile(values, (0.25, 0.75))
    far = OUTLYING * (high - low)
    usual = values[(values >= low - far) & (values <= high + far)] if far > 0 else values
    return float(usual.min()), float(usual.max())


def _mean_around(values: np.ndarray, half: int) -> np.ndarray:
    total = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, len(at))
    return (total[high] - total[low]) / (high - low)


def stretches(steps: np.ndarray) -> list[slice]:
    """Return the stretches through which a line is drawn; a gap of more than three usual distances interrupts it."""
    distances = np.diff(steps)
    gaps = np.flatnonzero(distances > 3 * np.median(distances)) + 1 if len(distances) else np.array([], int)
    edges = [0, *gaps.tolist(), len(steps)]
    return [slice(start, end) for start, end in zip(edges, edges[1:], strict=False)]


def thin(values: np.ndarray, most: int = MOST) -> np.ndarray:
    """Return ascending indices of at most 2 * `most` values: the least and the greatest of each of `most` stretches."""
    if len(values) <= 2 * most:
        return np.arange(len(values))
    edges = np.linspace(0, len(values), most + 1).astype(int)
    kept = {start + pick(values[start:end]) for start, end in zip(edges, edges[1:], strict=False) for pick in PICKS}
    return np.array(sorted(kept | {0, len(values) - 1}))


PICKS = (np.argmin, np.argmax)


def limits(series: list[Series]) -> tuple[float, float]:
    """Return (low, high) that hold every mean, and all values except outliers."""
    ranges = [usual_range(s.values) if s.noisy else (float(s.values.min()), float(s.values.max())) for s in series]
    return min(low for low, _ in ranges), max(high for _, high in ranges)

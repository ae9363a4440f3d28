"""Series of a chart: smoothing, gaps without measurements, and thinning to the chart's resolution."""

from dataclasses import dataclass

import numpy as np

# Number of parts into which `thin` divides a line. It keeps at most two points of each.
MOST = 240
# The running mean averages about 1/SMOOTHED of a line's points.
SMOOTHED = 50
# Up to this many points are drawn without smoothing.
FEW = 30
# Values further than this many interquartile ranges from the quartiles are outliers.
OUTLYING = 5


@dataclass(frozen=True)
class Series:
    """Line of a chart: finite values at ascending steps.

    color:  1 .. 6, index into the palette.
    dashed: draw dashed, for a bound, a prediction, or a color that repeats.
    """

    label: str
    steps: np.ndarray
    values: np.ndarray
    color: int
    dashed: bool = False

    @property
    def noisy(self) -> bool:
        """Return True if there are enough values to draw a running mean."""
        return len(self.values) > FEW

    @property
    def smooth(self) -> np.ndarray:
        """Return the running mean with outliers clipped; the values themselves if there are few."""
        if not self.noisy:
            return self.values
        half = max(len(self.values) // SMOOTHED // 2, 1)
        clipped = np.clip(self.values, *usual_range(self.values))
        # Apply it twice, because a single box filter leaves visible steps.
        return _running_mean(_running_mean(clipped, half), half)


def usual_range(values: np.ndarray) -> tuple[float, float]:
    """Return (low, high) of the values, ignoring outliers: beyond the quartiles by OUTLYING interquartile ranges."""
    low, high = np.quantile(values, (0.25, 0.75))
    margin = OUTLYING * (high - low)
    inliers = values[(values >= low - margin) & (values <= high + margin)] if margin > 0 else values
    return float(inliers.min()), float(inliers.max())


def _running_mean(values: np.ndarray, half: int) -> np.ndarray:
    """Return the mean of each value and up to `half` neighbours on each side."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, len(index))
    return (total[high] - total[low]) / (high - low)


def stretches(steps: np.ndarray) -> list[slice]:
    """Return slices of the steps between gaps. A gap is over three times the median distance of successive steps."""
    distances = np.diff(steps)
    gaps = np.flatnonzero(distances > 3 * np.median(distances)) + 1 if len(distances) else np.array([], int)
    edges = [0, *gaps.tolist(), len(steps)]
    return [slice(start, end) for start, end in zip(edges, edges[1:], strict=False)]


def thin(values: np.ndarray, most: int = MOST) -> np.ndarray:
    """Return ascending indices of the values to draw: the minimum and maximum of each of `most` equal parts.

    The first and the last index are always included. With at most 2 * `most` values, all are kept.
    """
    if len(values) <= 2 * most:
        return np.arange(len(values))
    edges = np.linspace(0, len(values), most + 1).astype(int)
    kept = {start + pick(values[start:end]) for start, end in zip(edges, edges[1:], strict=False) for pick in PICKS}
    return np.array(sorted(kept | {0, len(values) - 1}))


PICKS = (np.argmin, np.argmax)


def limits(series: list[Series]) -> tuple[float, float]:
    """Return (low, high) of the y axis. It covers all values except outliers of long series."""
    ranges = [usual_range(s.values) if s.noisy else (float(s.values.min()), float(s.values.max())) for s in series]
    return min(low for low, _ in ranges), max(high for _, high in ranges)

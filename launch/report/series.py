"""Values over steps: smoothing, gaps without measurements, and thinning to the resolution of a chart."""

from typing import Any

import numpy as np

# Number of parts into which `thin` divides a line. It keeps at most two points of each.
MOST = 240
# The running mean averages about 1/SMOOTHED of a line's points.
SMOOTHED = 50
# Up to this many points are drawn without smoothing.
FEW = 30
# Values further than this many interquartile ranges from the quartiles are outliers.
OUTLYING = 5
# A larger value would overflow in the arithmetic of axes.
LARGEST = 1e100


def series(steps: np.ndarray, values: np.ndarray) -> dict[str, Any]:
    """Return what script.js draws of a metric: `line` is its running mean, `faint` its values if there are many.

    Both are [[[step, value], ..], ..], as `strokes` returns. `low` and `high` are the limits of the y axis.

    values: [n], finite, n > 0.
    """
    values = np.clip(values, -LARGEST, LARGEST)
    low, high = limits(values)
    faint = strokes(steps, values) if len(values) > FEW else []
    return {"line": strokes(steps, smooth(values)), "faint": faint, "low": low, "high": high}


def limits(values: np.ndarray) -> tuple[float, float]:
    """Return (low, high) of the values, without outliers if there are many values."""
    if len(values) > FEW:
        low, high = np.quantile(values, (0.25, 0.75))
        margin = OUTLYING * (high - low)
        values = values[(values >= low - margin) & (values <= high + margin)] if margin > 0 else values
    return float(values.min()), float(values.max())


def smooth(values: np.ndarray) -> np.ndarray:
    """Return the running mean with outliers clipped; the values themselves if there are few."""
    if len(values) <= FEW:
        return values
    half = max(len(values) // SMOOTHED // 2, 1)
    index = np.arange(len(values))
    first, end = np.maximum(index - half, 0), np.minimum(index + half + 1, len(index))
    smoothed = np.clip(values, *limits(values))
    for _ in range(2):  # a single box filter leaves visible steps
        total = np.concatenate([[0.0], np.cumsum(smoothed)])
        smoothed = (total[end] - total[first]) / (end - first)
    return smoothed


def strokes(steps: np.ndarray, values: np.ndarray) -> list[list[list[float]]]:
    """Return [[[step, value], ..], ..]: the thinned points of each stretch without a gap.

    A gap is over three times the median distance of successive steps.
    """
    distances = np.diff(steps)
    gaps = np.flatnonzero(distances > 3 * np.median(distances)) + 1 if len(distances) else []
    pairs = zip(np.split(steps, gaps), np.split(values, gaps), strict=True)
    return [
        [[int(x), float(f"{y:.7g}")] for x, y in zip(part[indices], of_part[indices], strict=True)]
        for part, of_part in pairs
        for indices in [thin(of_part)]
    ]


def thin(values: np.ndarray) -> np.ndarray:
    """Return ascending indices of the values to draw: the minimum and maximum of each of MOST equal parts.

    The first and the last index are always included. With at most 2 * MOST values, all are kept.
    """
    if len(values) <= 2 * MOST:
        return np.arange(len(values))
    parts = np.array_split(np.arange(len(values)), MOST)
    indices = {part[pick(values[part])] for part in parts for pick in (np.argmin, np.argmax)}
    return np.array(sorted(indices | {0, len(values) - 1}))

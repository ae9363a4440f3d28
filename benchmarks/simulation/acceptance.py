"""Acceptance of drafts by position, from one measured acceptance length."""

from collections.abc import Callable, Sequence

import numpy as np

# Each position of a draft is accepted less often than the one before, given that all before were: by this factor in
# 88.6% / 77.0% / 66.3% accepted of positions 1 to 3 (SkyRL#1832).
DECAY = 0.986
# Halvings of an interval of width 1.
_HALVINGS = 60


def acceptance_length(first: np.ndarray | float, draft_length: int, decay: float = DECAY) -> np.ndarray:
    """Return the expected tokens per verification, of the shape of `first`.

    first: probability that position 1 of a draft is accepted. For position i, given that all before it are
    accepted, it is first * decay ** (i - 1).
    """
    rate = np.array(first, np.float64)
    reached, tokens = np.ones_like(rate), np.ones_like(rate)
    for _ in range(draft_length):
        reached = reached * rate
        tokens = tokens + reached
        rate = rate * decay
    return tokens


def first_rate(length: float, draft_length: int, decay: float = DECAY) -> float:
    """Return the acceptance of position 1 that gives an acceptance length at a draft length; inverse of the above.

    Raises ValueError if no acceptance gives it.
    """
    if not 1 <= length <= draft_length + 1:
        raise ValueError(f"acceptance_length = {length}: must be within 1 and {draft_length + 1} at k = {draft_length}")
    return bisect(lambda rate: float(acceptance_length(rate, draft_length, decay)) - length, 0.0, 1.0)


def predict_length(measured: float, measured_at: int, draft_length: int) -> float:
    """Return the acceptance length at a draft length, from the one measured at another."""
    decay = _decay_of(measured, measured_at)
    return float(acceptance_length(first_rate(measured, measured_at, decay), draft_length, decay))


def tokens_per_round(
    measured: float, measured_at: int, draft_lengths: Sequence[int], shape: tuple[int, ...]
) -> np.ndarray:
    """Return the tokens that each row gains in a round, float64 [draft lengths, *shape]; all rows gain the same."""
    gains = [predict_length(measured, measured_at, k) for k in draft_lengths]
    return np.broadcast_to(np.reshape(gains, (-1, *(1 for _ in shape))), (len(gains), *shape))


def _decay_of(measured: float, measured_at: int) -> float:
    """Return the decay that an acceptance length allows: almost full acceptance has none."""
    return 1.0 if measured >= float(acceptance_length(1.0, measured_at)) else DECAY


def bisect(function: Callable[[float], float], low: float, high: float) -> float:
    """Return a root of a rising function; the nearer end of the interval if it has none there."""
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < 0 else (low, middle)
    return (low + high) / 2

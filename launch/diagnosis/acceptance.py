"""Measured against predicted acceptance, by position in the draft and by place in the completion."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from launch.diagnosis.findings import Finding
from launch.diagnosis.observed import Observed

# A difference counts if it is not small, and this unlikely under the prediction.
SMALL, UNLIKELY = 0.02, 1e-3
SHORTEST_PLACE = 16


@dataclass(frozen=True)
class Rate:
    """Acceptance of some drafted tokens, each given that those before it in its draft were accepted.

    Attributes:
        name:      which tokens.
        count:     how many.
        measured:  share accepted.
        predicted: mean of sum_v min(p, q) over the same tokens; None where training predicts none.
        tail:      probability of a share as far off, or further, on the same side, if the prediction holds; binomial,
                   which is wider than the exact law, whose chances differ by token. None without a prediction.
    """

    name: str
    count: int
    measured: float
    predicted: float | None = None
    tail: float | None = None

    @property
    def is_off(self) -> bool:
        """Return whether the prediction does not hold."""
        if self.predicted is None or self.tail is None:
            return False
        return abs(self.measured - self.predicted) > SMALL and self.tail < UNLIKELY

    @property
    def said(self) -> str:
        """Return both numbers in words."""
        return f"{self.measured:.2f} accepted, {self.predicted:.2f} predicted, at {self.name} ({self.count} tokens)"


def rates(observed: Observed, overlaps: np.ndarray | None) -> tuple[list[Rate], list[Rate]]:
    """Return the acceptance by position in the draft, and that of position 1 by place in the completion.

    overlaps: float [positions, R, T] (`make_overlaps`); None where there is no prediction.
    """
    drafted, count = observed.drafted, 0 if overlaps is None else len(overlaps)
    predicted = np.full(len(drafted.row), np.nan)
    if overlaps is not None:
        position = np.minimum(drafted.position, count - 1)
        predicted = overlaps[position, drafted.row, observed.prompt_lengths[drafted.row] + drafted.place]

    def rate(name: str, which: np.ndarray, position: int) -> Rate:
        return _rate(name, drafted.accepted[which], predicted[which] if position < count else None)

    by_position = [
        rate(f"position {number + 1}", drafted.position == number, number)
        for number in range(int(drafted.position.max(initial=-1)) + 1)
    ]
    by_place, start, end = [], 0, SHORTEST_PLACE
    while start <= drafted.place.max(initial=-1):
        there = (drafted.position == 0) & (start <= drafted.place) & (drafted.place < end)
        by_place.append(rate(f"tokens {start + 1} to {end}", there, 0))
        start, end = end, 2 * end
    return [rate for rate in by_position if rate.count], [rate for rate in by_place if rate.count]


def _rate(name: str, accepted: np.ndarray, predicted: np.ndarray | None) -> Rate:
    count = len(accepted)
    measured = float(accepted.mean()) if count else 0.0
    if predicted is None or not count:
        return Rate(name, count, measured)
    mean = float(np.clip(predicted, 0, 1).mean())
    law, hits = stats.binom(count, mean), int(accepted.sum())
    tail = law.cdf(hits) if measured < mean else law.sf(hits - 1)
    return Rate(name, count, measured, mean, float(tail))


def acceptance_findings(by_position: Sequence[Rate], by_place: Sequence[Rate]) -> list[Finding]:
    """Return whether drafts are accepted as often as training predicts.

    A place is blamed only if earlier ones are right. What is off by position then follows from it.
    """
    if by_position[0].predicted is None:
        said = f"{by_position[0].measured:.2f} at position 1; nothing is predicted for this kind of draft"
        return [Finding("acceptance", "not checked", said)]
    position = _compared(
        "acceptance by position",
        by_position,
        "drafting computes something else than training: its first step if position 1 is off, else the state that is "
        "fed back from one position to the next",
    )
    place = _compared(
        "acceptance by place",
        by_place,
        "drafting reads something else than training from there on: positions, windows or rope",
    )
    if by_place[0].is_off and position.state == "off":
        return [position, Finding(place.check, "not checked", "off from the first tokens on: no place is at fault")]
    return [position.explained_by(place), place]


def _compared(check: str, rates: Sequence[Rate], do: str) -> Finding:
    off = [rate for rate in rates if rate.is_off]
    if not off:
        return Finding(check, "ok", rates[0].said)
    return Finding(check, "off", max(off, key=lambda rate: abs(rate.measured - (rate.predicted or 0))).said, do)

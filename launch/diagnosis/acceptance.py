"""Comparison of measured with predicted acceptance, by position in the draft and by place in the completion."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from launch.acceptance.counts import first_length, length_buckets
from launch.diagnosis.findings import Finding
from launch.diagnosis.observed import Observed

# A difference counts if it exceeds SMALL and its probability under the prediction is below UNLIKELY.
SMALL, UNLIKELY = 0.02, 1e-3


@dataclass(frozen=True)
class Rate:
    """Acceptance rate of a set of drafted tokens, given that all earlier tokens of the same draft were accepted.

    Attributes:
        name:      names the set.
        count:     number of tokens in it.
        measured:  fraction that was accepted.
        predicted: mean of sum_v min(p, q) over the same tokens; None if training does not predict it.
        tail:      one-sided binomial probability, under the prediction, of a fraction at least as far off. It is
                   conservative, because acceptance probabilities differ by token. None without a prediction.
    """

    name: str
    count: int
    measured: float
    predicted: float | None = None
    tail: float | None = None

    @property
    def is_off(self) -> bool:
        """Return True if the measured rate contradicts the prediction."""
        if self.predicted is None or self.tail is None:
            return False
        return abs(self.measured - self.predicted) > SMALL and self.tail < UNLIKELY

    @property
    def text(self) -> str:
        """Return a phrase with both numbers."""
        return f"{self.measured:.2f} accepted, {self.predicted:.2f} predicted, at {self.name} ({self.count} tokens)"


def rates(observed: Observed, overlaps: np.ndarray | None) -> tuple[list[Rate], list[Rate]]:
    """Return the acceptance rates by position in the draft, and the rates of position 1 by place in the completion.

    overlaps: float [positions, R, T] (`make_overlaps`); None if there is no prediction.
    """
    drafted, count = observed.drafted, 0 if overlaps is None else len(overlaps)
    predicted = np.full(len(drafted.row), np.nan)
    if overlaps is not None:
        position = np.minimum(drafted.position, count - 1)
        predicted = overlaps[position, drafted.row, observed.answers.prompt_lengths[drafted.row] + drafted.place]

    def rate(name: str, which: np.ndarray, position: int) -> Rate:
        return _rate(name, drafted.accepted[which], predicted[which] if position < count else None)

    by_position = [
        rate(f"position {number + 1}", drafted.position == number, number)
        for number in range(int(drafted.position.max(initial=-1)) + 1)
    ]
    first, ends = drafted.position == 0, length_buckets(drafted.place + 1)
    by_place = [
        rate(f"tokens {first_length(end)} to {end}", first & (ends == end), 0)
        for end in np.unique(ends[first]).tolist()
    ]
    return [rate for rate in by_position if rate.count], by_place


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
    """Return the findings of the comparison of measured with predicted acceptance.

    A place is reported only if earlier places are right; differences by position are then a consequence of it.
    """
    if by_position[0].predicted is None:
        result = f"{by_position[0].measured:.2f} at position 1; nothing is predicted for this kind of draft"
        return [Finding("acceptance", "not checked", result)]
    position = _compared(
        "acceptance by position",
        by_position,
        "drafting and training compute different things: in the first draft step if position 1 is off, otherwise in "
        "the state that is passed from one position to the next",
    )
    place = _compared(
        "acceptance by place",
        by_place,
        "from there on, drafting and training read different things: check positions, windows and rope",
    )
    if by_place[0].is_off and position.state == "off":
        return [position, Finding(place.check, "not checked", "off from the first tokens on, so at no special place")]
    return [position.explained_by(place), place]


def _compared(check: str, rates: Sequence[Rate], do: str) -> Finding:
    off = [rate for rate in rates if rate.is_off]
    if not off:
        return Finding(check, "ok", rates[0].text)
    return Finding(check, "off", max(off, key=lambda rate: abs(rate.measured - (rate.predicted or 0))).text, do)

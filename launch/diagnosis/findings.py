"""Findings of a diagnosis, and their report in plain words."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from launch.diagnosis.observed import Observed

# A difference counts beyond this many standard errors, and if it is not small.
STANDARD_ERRORS, SMALL = 3.0, 0.02
# Mean overlap below which a draft is of little use.
LOW = 0.5
SHORTEST_PLACE = 16


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        check: what was checked.
        ok:    whether nothing is off.
        said:  what was found, in a sentence.
        do:    what to do if it is off.
    """

    check: str
    ok: bool
    said: str
    do: str = ""


@dataclass(frozen=True)
class Rate:
    """Acceptance of some drafted tokens, each given that those before it in its draft were accepted.

    Attributes:
        name:      which tokens.
        count:     how many.
        measured:  share accepted.
        predicted: mean of sum_v min(p, q) over the same tokens; None for drafts that training does not predict.
        error:     standard error of `measured` if the prediction holds; None without one.
    """

    name: str
    count: int
    measured: float
    predicted: float | None
    error: float | None

    @property
    def is_off(self) -> bool:
        """Return whether the prediction does not hold."""
        if self.predicted is None or self.error is None:
            return False
        return abs(self.measured - self.predicted) > STANDARD_ERRORS * self.error + SMALL


@dataclass(frozen=True)
class Diagnosis:
    """All findings, and the acceptance by position in the draft and by place in the completion."""

    findings: list[Finding] = field(default_factory=list)
    by_position: list[Rate] = field(default_factory=list)
    by_place: list[Rate] = field(default_factory=list)

    @property
    def faults(self) -> list[Finding]:
        """Return the findings that are off."""
        return [finding for finding in self.findings if not finding.ok]

    def to_json(self) -> dict[str, Any]:
        """Return all of it, for a file."""
        return asdict(self) | {"ok": not self.faults}


def rates(observed: Observed, overlaps: np.ndarray | None) -> tuple[list[Rate], list[Rate]]:
    """Return the acceptance by position in the draft, and that of position 1 by place in the completion.

    overlaps: float [passes, R, T] (`make_overlaps`); None where there is no prediction.
    """
    drafted = observed.drafted
    predicted = None
    if overlaps is not None:
        predicted = overlaps[drafted.position, drafted.row, observed.prompt_lengths[drafted.row] + drafted.place]
    by_position = [
        _rate(f"position {number + 1}", drafted.position == number, drafted.accepted, predicted)
        for number in range(int(drafted.position.max(initial=-1)) + 1)
    ]
    by_place, start, end = [], 0, SHORTEST_PLACE
    while start <= drafted.place.max(initial=-1):
        there = (drafted.position == 0) & (start <= drafted.place) & (drafted.place < end)
        by_place.append(_rate(f"tokens {start + 1} to {end}", there, drafted.accepted, predicted))
        start, end = end, 2 * end
    return [rate for rate in by_position if rate.count], [rate for rate in by_place if rate.count]


def _rate(name: str, which: np.ndarray, accepted: np.ndarray, predicted: np.ndarray | None) -> Rate:
    count = int(which.sum())
    measured = float(accepted[which].mean()) if count else 0.0
    if predicted is None or not count:
        return Rate(name, count, measured, None, None)
    chance = np.clip(predicted[which], 0, 1)
    error = float(np.sqrt((chance * (1 - chance)).sum()) / count)
    return Rate(name, count, measured, float(chance.mean()), error)


def caches_finding(observed: Observed) -> Finding:
    """Return whether the caches held what a fresh prefill of the same tokens does."""
    caches = observed.caches
    if caches.not_compared is not None:
        return Finding("caches", True, f"not compared: {caches.not_compared}")
    if caches.fault is None:
        said = f"policy and draft agree with a fresh prefill, {caches.count} times in {observed.rounds} rounds"
        return Finding("caches", True, said)
    do = (
        "a fault in how the cache is written or read, not in training: specjax.testing.assert_cache_consistent shows it"
    )
    return Finding("caches", False, caches.fault, do)


def acceptance_findings(by_position: Sequence[Rate], by_place: Sequence[Rate]) -> Iterable[Finding]:
    """Yield whether drafting is accepted as often as training predicts."""
    if by_position[0].predicted is None:
        said = f"{by_position[0].measured:.2f} at position 1; training predicts none for this kind of draft"
        yield Finding("acceptance", True, said)
        return
    for check, rates, do in (
        (
            "acceptance by position",
            by_position,
            "drafting computes something else than training: its first step if position 1 is off, else the state that "
            "is fed back from one position to the next",
        ),
        (
            "acceptance by place",
            by_place,
            "drafting reads something else than training from there on: positions, windows or rope",
        ),
    ):
        off = [rate for rate in rates if rate.is_off]
        if off:
            worst = max(off, key=lambda rate: abs(rate.measured - (rate.predicted or 0)))
            yield Finding(
                check, False, f"{worst.name}: {worst.measured:.2f} accepted, {worst.predicted:.2f} predicted", do
            )
        else:
            yield Finding(check, True, f"as predicted, {by_position[0].predicted:.2f} at position 1")


def alternative_findings(
    own: np.ndarray, others: Iterable[tuple[str, str, np.ndarray]], completion: np.ndarray
) -> Iterable[Finding]:
    """Yield for each check whether another way to read the draft is accepted more.

    own: float [R, T], overlap as the draft is read. others: (check, option, overlap) of the other ways.
    completion: bool [R, T], tokens that count.
    """
    best: dict[str, tuple[str, float, float]] = {}
    for check, option, overlap in others:
        gain = (overlap - own)[completion]
        error = float(gain.std() / np.sqrt(len(gain)))
        if check not in best or gain.mean() > best[check][1]:
            best[check] = option, float(gain.mean()), error
    mean = float(own[completion].mean())
    for check, (option, gain, error) in best.items():
        ok = gain <= STANDARD_ERRORS * error + SMALL
        said = f"{option} would be accepted {mean + gain:.2f}, as it is read {mean:.2f}"
        yield Finding(check, ok, f"right: {said}" if ok else said, "" if ok else f"the draft was made for {option}")


def coverage_finding(target_ids: np.ndarray, observed: Observed) -> Finding:
    """Return whether the draft's vocabulary holds what the policy says."""
    said = observed.tokens[observed.completion]
    share = float(np.isin(said, target_ids).mean())
    text = f"{len(target_ids)} tokens, {share:.1%} of those that the policy generates"
    return Finding(
        "draft vocabulary", share >= 0.9, text, "no other token can be accepted: take a larger draft.vocab_size"
    )


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Print the rates, the findings, and what to do."""
    table = Table("acceptance", "tokens", "measured", "predicted", box=None)
    for rate in [*diagnosis.by_position, *diagnosis.by_place]:
        predicted = "-" if rate.predicted is None else f"{rate.predicted:.2f}"
        table.add_row(rate.name, str(rate.count), f"{rate.measured:.2f}", predicted + (" OFF" if rate.is_off else ""))
    console.print(table)
    for finding in diagnosis.findings:
        console.print(f"{'ok ' if finding.ok else 'OFF'}  {finding.check}: {finding.said}")
    for finding in diagnosis.faults:
        console.print(f"{finding.check} is off: {finding.do}")
    if not diagnosis.faults:
        console.print(_without_faults(diagnosis.by_position))


def _without_faults(by_position: Sequence[Rate]) -> str:
    first = by_position[0]
    if first.predicted is None or first.predicted >= LOW:
        return "Nothing is off."
    return (
        f"Nothing is off, but draft and policy agree on {first.predicted:.2f} of their probability only: the draft "
        "needs more training on this policy's answers (launch.distill, --draft-training.every)."
    )

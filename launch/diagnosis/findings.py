"""Findings about caches, vocabulary, and how a head is read."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from launch.diagnosis.observed import CacheComparison, Observed

# Mean overlap below which a draft is of little use, and nothing can be said of how it should be read.
LOW = 0.5
# A gain of another reading counts beyond this many standard errors and this much.
STANDARD_ERRORS, SMALL_GAIN = 3.0, 0.01
COVERED = 0.9

State = Literal["ok", "off", "undecided", "not checked"]


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        check: what was checked.
        state: undecided if the numbers allow both; not checked if there is nothing to compare with.
        said:  what was found, in a sentence.
        do:    what to do if it is off.
    """

    check: str
    state: State
    said: str
    do: str = ""

    def explained_by(self, cause: "Finding") -> "Finding":
        """Return the finding, no longer off if the cause is: one fault should be reported once."""
        if self.state != "off" or cause.state != "off":
            return self
        said = f"{self.said}; may follow from {cause.check}: check again once that is right"
        return replace(self, state="not checked", said=said, do="")


def caches_finding(caches: CacheComparison) -> Finding:
    """Return whether the caches held what a fresh prefill of the same tokens does."""
    if caches.not_compared is not None:
        return Finding("caches", "not checked", caches.not_compared)
    if caches.fault is None:
        said = f"those of policy and draft agree with a fresh prefill, {caches.count} times in the first batch"
        return Finding("caches", "ok", said)
    do = "a fault in how it is written or read, not in training: specjax.testing.assert_cache_consistent shows it"
    return Finding("caches", "off", caches.fault, do)


def alternative_findings(
    own: np.ndarray, others: Iterable[tuple[str, str, np.ndarray]], completion: np.ndarray
) -> Iterable[Finding]:
    """Yield for each check whether another way to read the draft is accepted more.

    own: float [R, T], overlap as the draft is read. others: (check, option, overlap) of the other ways.
    completion: bool [R, T], tokens that count.
    """
    best: dict[str, tuple[str, float, float]] = {}
    for check, option, overlap in others:
        gain, error = _mean(overlap - own, completion)
        if check not in best or gain > best[check][1]:
            best[check] = option, gain, error
    mean, _ = _mean(own, completion)
    for check, (option, gain, error) in best.items():
        said = f"mean overlap of all completion tokens {mean:.2f} as it is read, {mean + gain:.2f} with {option}"
        do = f"the draft agrees better with {option}: it was probably made for that"
        if max(mean, mean + gain) < LOW:
            yield Finding(check, "undecided", f"{said}: too little to tell how the draft should be read")
        elif gain > SMALL_GAIN + STANDARD_ERRORS * error:
            yield Finding(check, "off", said, do)
        elif gain <= 0 or gain + STANDARD_ERRORS * error <= SMALL_GAIN:
            yield Finding(check, "ok", said)
        else:
            yield Finding(check, "undecided", f"{said}: take more --prompts to tell")


def _mean(x: np.ndarray, counted: np.ndarray) -> tuple[float, float]:
    """Return the mean of x [R, T] where it counts, and its standard error. Tokens of one row are not independent."""
    mean, rows = x[counted].mean(), len(x)
    by_row = np.where(counted, x - mean, 0).sum(axis=1)
    error = np.sqrt((by_row**2).sum() * rows / (rows - 1)) / counted.sum() if rows > 1 else np.inf
    return float(mean), float(error)


def coverage_finding(target_ids: np.ndarray, observed: Observed) -> Finding:
    """Return whether the draft's vocabulary holds what the policy says."""
    share = float(np.isin(observed.tokens[observed.completion], target_ids).mean())
    said = f"{len(target_ids)} tokens, {share:.1%} of those that the policy generates"
    do = "no other token can be accepted: take a larger draft.vocab_size"
    return Finding("draft vocabulary", "ok" if share >= COVERED else "off", said, do)

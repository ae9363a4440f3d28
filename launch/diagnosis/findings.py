"""Findings about caches, the draft vocabulary, and the way a head is read."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from launch.diagnosis.observed import CacheComparison, Observed

# With a mean overlap below this, a draft is of little use, and the check cannot tell how it should be read.
LOW = 0.5
# Another way to read the draft counts as better if its gain exceeds SMALL_GAIN by this many standard errors.
STANDARD_ERRORS, SMALL_GAIN = 3.0, 0.01
# Fraction of the policy's tokens that a draft vocabulary should hold.
COVERED = 0.9

State = Literal["ok", "off", "undecided", "not checked"]


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        check: name of the check.
        state: undecided if the numbers allow both answers; not checked if there is nothing to compare with.
        said:  the result, as a sentence.
        do:    what to do if it is off.
    """

    check: str
    state: State
    said: str
    do: str = ""

    def explained_by(self, cause: "Finding") -> "Finding":
        """Return the finding as "not checked" if the cause is off too, so that one fault is reported once."""
        if self.state != "off" or cause.state != "off":
            return self
        result = f"{self.said}; may be a consequence of {cause.check}: check again when that is corrected"
        return replace(self, state="not checked", said=result, do="")


def caches_finding(caches: CacheComparison) -> Finding:
    """Return the finding of the comparison of the caches with a fresh prefill of the same tokens."""
    if caches.not_compared is not None:
        return Finding("caches", "not checked", caches.not_compared)
    if caches.fault is None:
        result = f"policy's and draft's agree with a fresh prefill, in {caches.count} comparisons in the first batch"
        return Finding("caches", "ok", result)
    do = "the cache is written or read wrongly; training is not at fault: see specjax.testing.assert_cache_consistent"
    return Finding("caches", "off", caches.fault, do)


def alternative_findings(
    current: np.ndarray, others: Iterable[tuple[str, str, np.ndarray]], completion: np.ndarray
) -> Iterable[Finding]:
    """Yield one finding per check: is the draft accepted more often if it is read in another way?

    current:    float [R, T], overlap of the draft as the run reads it.
    others:     (check, option, overlap) of the other ways.
    completion: bool [R, T], tokens that count.
    """
    best: dict[str, tuple[str, float, float]] = {}
    for check, option, overlap in others:
        gain, error = _mean(overlap - current, completion)
        if check not in best or gain > best[check][1]:
            best[check] = option, gain, error
    mean, _ = _mean(current, completion)
    for check, (option, gain, error) in best.items():
        result = f"mean overlap of all completion tokens {mean:.2f} as configured, {mean + gain:.2f} with {option}"
        do = f"the draft agrees better with the policy with {option}: it was probably trained with that"
        if max(mean, mean + gain) < LOW:
            yield Finding(check, "undecided", f"{result}: too low to tell how the draft should be read")
        elif gain > SMALL_GAIN + STANDARD_ERRORS * error:
            yield Finding(check, "off", result, do)
        elif gain <= 0 or gain + STANDARD_ERRORS * error <= SMALL_GAIN:
            yield Finding(check, "ok", result)
        else:
            yield Finding(check, "undecided", f"{result}: needs more --prompts to decide")


def _mean(x: np.ndarray, counted: np.ndarray) -> tuple[float, float]:
    """Return the mean of x [R, T] where `counted`, and its standard error with tokens of a row treated as dependent."""
    mean, rows = x[counted].mean(), len(x)
    by_row = np.where(counted, x - mean, 0).sum(axis=1)
    error = np.sqrt((by_row**2).sum() * rows / (rows - 1)) / counted.sum() if rows > 1 else np.inf
    return float(mean), float(error)


def coverage_finding(target_ids: np.ndarray, observed: Observed) -> Finding:
    """Return the finding on how many of the policy's tokens the draft's reduced vocabulary holds."""
    coverage = float(np.isin(observed.answers.completions, target_ids).mean())
    result = f"{len(target_ids)} tokens, which cover {coverage:.1%} of those that the policy generates"
    do = "tokens outside it cannot be accepted: use a larger draft.vocab_size"
    return Finding("draft vocabulary", "ok" if coverage >= COVERED else "off", result, do)

"""Estimates from samples of each prompt: pass@k, majority@k, and their intervals over prompts."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

LEVEL = 0.95
INTERVAL = f"{LEVEL:.0%} intervals over prompts: Wilson's, of as many rights and wrongs as scatter like the prompts"
# The quantile of the normal distribution that LEVEL stands for.
Z = 1.959964


class Estimate(NamedTuple):
    """A mean over prompts with its interval."""

    value: float
    low: float
    high: float


def pass_at_k(correct: Bool[np.ndarray, "prompts samples"], k: int) -> Float[np.ndarray, "prompts"]:
    """Return an unbiased estimate of the chance that at least one of k samples of a prompt is right.

    Chen et al. 2021 (arXiv 2107.03374), equation 1: 1 - C(n - c, k) / C(n, k), where c of n samples are right.
    """
    samples = correct.shape[1]
    wrong, drawn = samples - correct.sum(axis=1, keepdims=True), np.arange(k)[None]
    return 1 - np.prod(np.maximum(wrong - drawn, 0) / (samples - drawn), axis=1)


def majority_at_k(
    answers: Sequence[Sequence[str | None]], correct: Bool[np.ndarray, "prompts samples"], k: int
) -> Float[np.ndarray, "prompts"]:
    """Return the chance that the most frequent answer among k samples of a prompt is right (arXiv 2203.11171).

    The mean over as many groups of k different samples as there are. All that was scored as right is one answer;
    others are the same where their text is. None gives no answer. Of answers given equally often each counts alike.
    """
    groups = correct.shape[1] // k
    values = []
    for given, right in zip(answers, correct, strict=True):
        voted = [(True, None) if good else (False, answer) for answer, good in zip(given, right, strict=True)]
        values.append(np.mean([_vote(voted[start : start + k]) for start in range(0, groups * k, k)]))
    return np.array(values)


def over_prompts(values: Float[np.ndarray, "prompts"]) -> Estimate:
    """Return the mean of values within 0 .. 1 with the interval that INTERVAL describes.

    Where every prompt comes to 0 or 1, that is as many as there are prompts. Shares scatter less, and are worth more.
    How much is told with one prompt more that comes to 0 and one to 1: few that happen to be alike are not certain.
    """
    mean, more = float(np.mean(values)), np.append(values, (0.0, 1.0)).astype(np.float64)
    count = len(values) * more.mean() * (1 - more.mean()) / more.var()
    center, half = mean + Z**2 / (2 * count), Z * np.sqrt(mean * (1 - mean) / count + Z**2 / (4 * count**2))
    low, high = ((center + sign * half) / (1 + Z**2 / count) for sign in (-1, 1))
    return Estimate(mean, max(float(low), 0.0), min(float(high), 1.0))


def _vote(voted: Sequence[tuple[bool, str | None]]) -> float:
    """Return the share of right answers among the most frequent ones; 0 if no answer was given."""
    counts = Counter(vote for vote in voted if vote != (False, None))
    if not counts:
        return 0.0
    most = max(counts.values())
    first = [right for (right, _), count in counts.items() if count == most]
    return sum(first) / len(first)

"""Estimates from several samples per prompt: pass@k, majority@k, and their intervals over questions."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

LEVEL = 0.95
INTERVAL = f"{LEVEL:.0%} Wilson intervals, effective sample size from the spread over questions"
# Two-sided normal quantile of LEVEL.
Z = 1.959964


class Estimate(NamedTuple):
    """A mean over prompts with its interval."""

    value: float
    low: float
    high: float


def pass_at_k(correct: Bool[np.ndarray, "prompts samples"], k: int) -> Float[np.ndarray, "prompts"]:
    """Return an unbiased estimate, per prompt, of the probability that at least one of k samples is correct.

    Chen et al. 2021 (arXiv 2107.03374), equation 1: 1 - C(n - c, k) / C(n, k), where c of n samples are correct.
    """
    samples = correct.shape[1]
    wrong, i = samples - correct.sum(axis=1, keepdims=True), np.arange(k)[None]
    return 1 - np.prod(np.maximum(wrong - i, 0) / (samples - i), axis=1)


def majority_at_k(
    answers: Sequence[Sequence[str | None]], correct: Bool[np.ndarray, "prompts samples"], k: int
) -> Float[np.ndarray, "prompts"]:
    """Return, per prompt, the probability that the most frequent of k answers is correct (arXiv 2203.11171).

    The estimate is the mean over samples // k disjoint groups of k samples. All correct samples count as one answer.
    Wrong samples have the same answer if their texts are equal; those with answer None do not vote. A tie scores the
    fraction of its answers that are correct.
    """
    groups = correct.shape[1] // k
    values = []
    for row_answers, row_correct in zip(answers, correct, strict=True):
        votes = [(True, None) if ok else (False, text) for text, ok in zip(row_answers, row_correct, strict=True)]
        values.append(np.mean([_majority(votes[start : start + k]) for start in range(0, groups * k, k)]))
    return np.array(values)


def over_prompts(values: Float[np.ndarray, "prompts"], questions: Sequence[str] | None = None) -> Estimate:
    """Return the mean of values in 0 .. 1, with its Wilson interval for the effective number of 0/1 trials.

    questions: question of each prompt; None: all differ. Prompts with equal questions are one problem, whose value is
    their mean: as independent trials they would make the interval too narrow.

    The number of trials is n * m (1 - m) / variance, for n questions. It is about n if every question's value is 0 or
    1; fractions vary less, so each question counts as several trials. Mean m and variance include one extra 0 and one
    extra 1, so that a few equal values do not give an interval of width zero.
    """
    if questions is not None:
        _, question = np.unique(questions, return_inverse=True)
        values = np.bincount(question, values) / np.bincount(question)
    mean, padded = float(np.mean(values)), np.append(values, (0.0, 1.0)).astype(np.float64)
    trials = len(values) * padded.mean() * (1 - padded.mean()) / padded.var()
    center, half_width = mean + Z**2 / (2 * trials), Z * np.sqrt(mean * (1 - mean) / trials + Z**2 / (4 * trials**2))
    low, high = ((center + sign * half_width) / (1 + Z**2 / trials) for sign in (-1, 1))
    return Estimate(mean, max(float(low), 0.0), min(float(high), 1.0))


def _majority(votes: Sequence[tuple[bool, str | None]]) -> float:
    """Return the fraction of the most frequent answers that is correct; 0 if no answer was given.

    votes: (is correct, text of a wrong answer).
    """
    counts = Counter(vote for vote in votes if vote != (False, None))
    if not counts:
        return 0.0
    highest = max(counts.values())
    winners_correct = [correct for (correct, _), count in counts.items() if count == highest]
    return sum(winners_correct) / len(winners_correct)

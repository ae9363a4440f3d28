"""What sampled completions must follow, computed in float64 without the code under test, and how well they do."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import stats

from specjax.sampling import SamplingLaw
from specjax.types import Rollout

Cells = dict[tuple[int, ...], float]
LEVEL = 1e-6


def reference_law(logits: np.ndarray, law: SamplingLaw) -> np.ndarray:
    """Probabilities of one position: temperature, top-k, top-p, min-p, in that order."""
    if law.temperature == 0:
        return np.eye(len(logits))[np.argmax(logits)]
    p = np.exp((logits - logits.max()) / np.float64(law.temperature))
    p /= p.sum()
    if law.top_k is not None:
        p = _keep(p, p >= np.sort(p)[::-1][min(law.top_k, len(p)) - 1])
    if law.top_p < 1:
        kept, mass = 0.0, 0.0
        for kept in np.sort(p)[::-1]:
            mass += kept
            if mass >= law.top_p:
                break
        p = _keep(p, p >= kept)
    return _keep(p, p >= law.min_p * p.max())


def _keep(p: np.ndarray, kept: np.ndarray) -> np.ndarray:
    p = np.where(kept, p, 0.0)
    return p / p.sum()


def completion_law(
    logits_of: Callable[[np.ndarray], np.ndarray],
    prompt: tuple[int, ...],
    vocab: int,
    stops: tuple[int, ...],
    budget: int,
    law: SamplingLaw,
) -> Cells:
    """The probability of every completion, by teacher-forcing `logits_of` (tokens [n, T] -> logits [n, T, V])."""
    paths = list(itertools.product([v for v in range(vocab) if v not in stops], repeat=budget))
    logits = np.asarray(logits_of(np.array([prompt + path for path in paths])), np.float64)
    following = {
        path[:t]: reference_law(row[len(prompt) - 1 + t], law)
        for path, row in zip(paths, logits, strict=True)
        for t in range(budget)
    }
    cells: Cells = {}

    def extend(prefix: tuple[int, ...], probability: float) -> None:
        if len(prefix) == budget or (prefix and prefix[-1] in stops):
            cells[prefix] = probability
            return
        for token, p in enumerate(following[prefix]):
            if p > 0:
                extend((*prefix, token), probability * float(p))

    extend((), 1.0)
    return cells


def count_completions(rollout: Rollout) -> dict[tuple[int, ...], int]:
    """How often each completion was sampled."""
    tokens, lengths = np.asarray(rollout.tokens), np.asarray(rollout.lengths)
    rows, counts = np.unique(np.concatenate([lengths[:, None], tokens], axis=1), axis=0, return_counts=True)
    return {tuple(row[1 : 1 + row[0]].tolist()): int(n) for row, n in zip(rows, counts, strict=True)}


@dataclass(frozen=True)
class Fit:
    """A chi-square test of counts against a law, rare cells pooled until each expects 10."""

    statistic: float
    freedom: int
    draws: int
    impossible: int

    @property
    def p_value(self) -> float:
        return 0.0 if self.impossible else float(stats.chi2.sf(self.statistic, self.freedom))

    def power(self, total_variation: float) -> float:
        """The chance to reject, at LEVEL, any law of the pooled cells this far away.

        Whatever its shape, such a law has chi-square distance at least (2 tv)^2 (Cauchy-Schwarz).
        """
        critical = stats.chi2.isf(LEVEL, self.freedom)
        return float(stats.ncx2.sf(critical, self.freedom, self.draws * (2 * total_variation) ** 2))


def fit(counts: dict[tuple[int, ...], int], cells: Cells) -> Fit:
    draws = sum(counts.values())
    expected = np.array(list(cells.values())) * draws
    observed = np.array([counts.get(cell, 0) for cell in cells])
    order = np.argsort(expected)
    pooled = max(int(np.searchsorted(np.cumsum(expected[order]), 10)) + 1, int(np.sum(expected < 10)))
    rare, common = order[:pooled], order[pooled:]
    expected = np.append(expected[common], expected[rare].sum())
    observed = np.append(observed[common], observed[rare].sum())
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return Fit(statistic, len(expected) - 1, draws, sum(n for cell, n in counts.items() if cell not in cells))

"""Exact laws of completions, multiplied out from `process_logits` in float64, and a chi-square test against them."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from scipy import stats

from specjax.parallel import processes
from specjax.sampling import SamplingLaw, process_logits
from specjax.types import Rollout

Completion = tuple[int, ...]
Cells = dict[Completion, float]
Counts = dict[Completion, int]
LEVEL = 1e-6


def reference_law(logits: np.ndarray, law: SamplingLaw) -> np.ndarray:
    """Return the probabilities of `process_logits`, normalised in float64, [.., V]."""
    log_p = processes.fetch(process_logits(jnp.asarray(logits, jnp.float32), law))
    p = np.exp(log_p.astype(np.float64))
    return p / p.sum(axis=-1, keepdims=True)


def completion_law(
    logits_of: Callable[[np.ndarray], np.ndarray],
    prompt: tuple[int, ...],
    vocab: int,
    stops: tuple[int, ...],
    budget: int,
    law: SamplingLaw,
    ends: Callable[[Completion], bool] = lambda _: False,
    answer: Callable[[Completion, int, int], Completion | None] | None = None,
    turn_tokens: int | None = None,
) -> Cells:
    """Return the probability of every completion.

    logits_of: tokens [n, T] -> logits [n, T, V], teacher-forced.
    ends: whether a turn ends after these tokens of it, beside those that end with one of `stops`.
    answer: (completion, where its last turn began, number of turns before) -> what an environment answers to the turn;
            None: the completion ends. Without it, it ends with its first turn.
    turn_tokens: most tokens that are drawn in a turn.
    """
    tokens = [v for v in range(vocab) if v not in stops or answer is not None]
    paths = list(itertools.product(tokens, repeat=budget))
    logits = np.array(processes.fetch(logits_of(np.array([prompt + path for path in paths]))), np.float64)
    laws = reference_law(logits[:, len(prompt) - 1 : len(prompt) - 1 + budget], law)
    following = {path[:t]: row[t] for path, row in zip(paths, laws, strict=True) for t in range(budget)}
    cells: Cells = {}

    def extend(prefix: Completion, probability: float, began: int = 0, turn: int = 0) -> None:
        if len(prefix) > began and (prefix[-1] in stops or ends(prefix[began:])):
            observed = None if answer is None else answer(prefix, began, turn)
            if observed is not None:
                begun = prefix + observed
                return draw(begun, probability, len(begun), turn + 1)
        elif len(prefix) < budget and (turn_tokens is None or len(prefix) - began < turn_tokens):
            return draw(prefix, probability, began, turn)
        cells[prefix] = probability

    def draw(prefix: Completion, probability: float, began: int, turn: int) -> None:
        for token, p in enumerate(following[prefix]):
            if p > 0:
                extend((*prefix, token), probability * float(p), began, turn)

    draw((), 1.0, 0, 0)
    return cells


def count_completions(rollout: Rollout) -> Counts:
    """Return how often each completion was sampled."""
    tokens, lengths = processes.fetch((rollout.tokens, rollout.lengths))
    rows, counts = np.unique(np.concatenate([lengths[:, None], tokens], axis=1), axis=0, return_counts=True)
    return {tuple(row[1 : 1 + row[0]].tolist()): int(n) for row, n in zip(rows, counts, strict=True)}


@dataclass(frozen=True)
class Fit:
    """Result of a chi-square test of counts against a law. Rare cells are pooled until each expects 10.

    Attributes:
        statistic:       Chi-square statistic.
        freedom:         Its degrees of freedom.
        draws:           Number of completions counted.
        impossible:      Number of them that the law does not allow; any is a failure.
        level:           Probability that a correct sampler fails.
        total_variation: Distance that `power` refers to.
    """

    statistic: float
    freedom: int
    draws: int
    impossible: int
    level: float
    total_variation: float

    @property
    def p_value(self) -> float:
        if self.impossible:
            return 0.0
        return float(stats.chi2.sf(self.statistic, self.freedom)) if self.freedom else 1.0

    @property
    def passes(self) -> bool:
        return self.p_value > self.level

    @property
    def power(self) -> float:
        """Return a lower bound on the probability that a law that differs by `total_variation` in pooled cells fails.

        Any such law has chi-square distance at least (2 tv)^2 (Cauchy-Schwarz). If there is only one cell, it gives
        `total_variation` of its mass to impossible completions.
        """
        if not self.freedom:
            return float(1 - (1 - self.total_variation) ** self.draws)
        critical = stats.chi2.isf(self.level, self.freedom)
        return float(stats.ncx2.sf(critical, self.freedom, self.draws * (2 * self.total_variation) ** 2))

    def __str__(self) -> str:
        return (
            f"chi-square {self.statistic:.1f} at {self.freedom} degrees of freedom, {self.impossible} impossible of "
            f"{self.draws} draws: p = {self.p_value:.2g} at level {self.level:.0e}, where a law {self.total_variation} "
            f"away in total variation fails with chance {self.power:.4f}"
        )


def fit(counts: Counts, cells: Cells, total_variation: float = 0.02, level: float = LEVEL) -> Fit:
    """Test the counts of completions against their law."""
    draws = sum(counts.values())
    expected = np.array(list(cells.values())) * draws
    observed = np.array([counts.get(cell, 0) for cell in cells])
    order = np.argsort(expected)
    pooled = max(int(np.searchsorted(np.cumsum(expected[order]), 10)) + 1, int(np.sum(expected < 10)))
    rare, common = order[:pooled], order[pooled:]
    expected = np.append(expected[common], expected[rare].sum())
    observed = np.append(observed[common], observed[rare].sum())
    statistic = float(((observed - expected) ** 2 / expected).sum())
    impossible = sum(n for cell, n in counts.items() if cell not in cells)
    return Fit(statistic, len(expected) - 1, draws, impossible, level, total_variation)

"""Completion lengths: drawn from a lognormal distribution with a limit, or from those that a run measured."""

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr, ndtri

from benchmarks.simulation.acceptance import bisect


@dataclass(frozen=True)
class Lengths:
    """Distribution of completion lengths, in tokens.

    Attributes:
        median:   Median before the limit.
        spread:   Standard deviation of the logarithm; 0: all of one length.
        limit:    Longest completion; longer ones are cut.
        measured: Lengths to draw from instead.
    """

    median: float
    spread: float
    limit: float
    measured: tuple[float, ...] = ()

    def draw(self, shape: tuple[int, ...], seed: int) -> np.ndarray:
        """Return float64 lengths of this shape.

        They are stratified: every quantile is met equally often, so that the mean of a batch hardly depends on the
        seed, but which sequences meet in a replica does.
        """
        rng = np.random.default_rng(seed)
        size = int(np.prod(shape))
        quantiles = rng.permutation((np.arange(size) + rng.random(size)) / size)
        if self.measured:
            samples = np.quantile(self.measured, quantiles)
        else:
            samples = self.median * np.exp(self.spread * ndtri(quantiles))
        return np.clip(samples, 1.0, self.limit).reshape(shape)

    def mean(self) -> float:
        """Return the mean length."""
        if self.measured:
            return float(np.clip(self.measured, 1.0, self.limit).mean())
        if not self.spread:
            return min(self.median, self.limit)
        sigma, above = self.spread, math.log(self.limit / self.median) / self.spread
        uncut = self.median * math.exp(sigma**2 / 2) * ndtr(above - sigma)
        return float(uncut + self.limit * ndtr(-above))


def with_mean(mean: float, spread: float, limit: float) -> Lengths:
    """Return the lognormal lengths that have a mean after the limit."""
    if not 1 <= mean <= limit:
        raise ValueError(f"mean_tokens = {mean}: must be within 1 and the limit, {limit}")
    most = math.log(1e3 * limit) + 4 * spread
    log_median = bisect(lambda x: Lengths(math.exp(x), spread, limit).mean() - mean, -10.0, most)
    return Lengths(math.exp(log_median), spread, limit)

"""Completion lengths: drawn from a lognormal distribution with a limit, or from those that a run measured."""

from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri

from launch.simulation.acceptance import bisect

# Draws by which a distribution is fitted to a mean.
_FITTED_BY = 4096


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
            drawn = np.quantile(self.measured, quantiles)
        else:
            drawn = self.median * np.exp(self.spread * ndtri(quantiles))
        return np.clip(drawn, 1.0, self.limit).reshape(shape)

    def mean(self) -> float:
        """Return the mean length."""
        return float(self.draw((_FITTED_BY,), 0).mean())


def with_mean(mean: float, spread: float, limit: float) -> Lengths:
    """Return the lognormal lengths that have a mean after the limit."""
    if not 1 <= mean <= limit:
        raise ValueError(f"mean_tokens = {mean}: must be within 1 and the limit, {limit}")
    log_median = bisect(lambda x: Lengths(float(np.exp(x)), spread, limit).mean() - mean, 0.0, np.log(1e3 * limit))
    return Lengths(float(np.exp(log_median)), spread, limit)

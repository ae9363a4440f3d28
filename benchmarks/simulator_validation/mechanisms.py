"""Mechanisms that may make the paper's 8B rounds slower than a roofline, each with constants fitted to two cells."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from scipy.optimize import least_squares

from benchmarks.simulator_validation.paper_8b_rollouts import (
    FITTED,
    GENERATION,
    ROOFLINE,
    WORKLOADS,
    RolloutFit,
    Workload,
)
from specjax.cost import EngineProfile

# A mechanism passes if the median and the worst error of the ten other cells are within these.
MEDIAN, WORST = 0.10, 0.20
# Largest error of a cell that was fitted, for the fit to count.
EXACT = 0.01


@dataclass(frozen=True)
class Mechanism:
    """A mechanism, and the workloads in which it is tried.

    Attributes:
        name:      What it is.
        engine:    From constants to an engine profile; times in milliseconds.
        start:     Constants from which the fit starts.
        workloads: Rows and limits.
    """

    name: str
    engine: Callable[..., EngineProfile]
    start: Sequence[float]
    workloads: Sequence[Workload] = WORKLOADS


def _attention(name: str, *points: Callable[[float], tuple[float, float]]) -> Mechanism:
    def engine(draft_ms: float, extra: float) -> EngineProfile:
        return replace(ROOFLINE, draft_pass=1e-3 * draft_ms, attention=tuple(point(extra) for point in points))

    return Mechanism(name, engine, (0.9, 1.0))


def _eager(draft_ms: float, eager_ms: float) -> EngineProfile:
    return replace(ROOFLINE, draft_pass=1e-3 * draft_ms, captured=512, eager=1e-3 * eager_ms)


def _overlapped(draft_ms: float, host_ms: float) -> EngineProfile:
    return replace(ROOFLINE, draft_pass=1e-3 * draft_ms, host=1e-3 * host_ms, overlapped=True)


# Query rows of attention are 4 (k + 1) of Qwen3-8B: 16 at k = 3, 24 at k = 5.
LINEAR = _attention(
    "draft pass, and attention slower beyond 16 query rows: linear", lambda g: (16.0, 1.0), lambda g: (64.0, 1 + 6 * g)
)
# With 128 rows, k = 3 is exactly the 512 tokens that vLLM captures, and k = 5 is 768.
AT_THE_LIMIT = tuple(
    Workload(128, limit, (zero, think))
    for limit in (16_384, 20_480)
    for zero in (0.7, 0.8, 0.9)
    for think in (0.4, 0.6)
)
MECHANISMS = (
    LINEAR,
    _attention("the same: one step", lambda g: (16.0, 1.0), lambda g: (16.001, 1 + g)),
    _attention(
        "the same: a step, then proportional to k + 1",
        lambda g: (16.0, 1.0),
        lambda g: (16.001, (1 + g) * 16 / 24),
        lambda g: (64.0, (1 + g) * 64 / 24),
    ),
    _attention(
        "the same: quadratic in k, from k = 1", *(lambda g, k=k: (4.0 * (k + 1), 1 + g * k**2 / 9) for k in range(13))
    ),
    Mechanism(
        "draft pass, and rounds beyond 512 tokens leave the captured graphs",
        _eager,
        (1.3, 35.0),
        (*AT_THE_LIMIT, *(Workload(rows, 16_384, (0.9, 0.4)) for rows in (16, 32, 64, 256))),
    ),
    Mechanism("host overlapped with the device", _overlapped, (3.0, 1.0)),
    Mechanism(
        "host in series with the device",
        lambda draft_ms: replace(ROOFLINE, draft_pass=1e-3 * draft_ms),
        (1.5,),
    ),
    Mechanism(
        "a roofline, nothing else",
        lambda: ROOFLINE,
        (),
        (*WORKLOADS, Workload(256, 8192, (0.9, 0.4))),
    ),
)


@dataclass(frozen=True)
class FittedMechanism:
    """A mechanism in a workload, fitted. errors: of the cells that were not fitted."""

    mechanism: Mechanism
    fit: RolloutFit
    constants: tuple[float, ...]

    @property
    def exact(self) -> bool:
        """True if it reproduces the cells that it was fitted to, which makes it a rival."""
        return all(abs(self.fit.speedups[cell] / GENERATION[cell][1] - 1) <= EXACT for cell in FITTED)

    @property
    def passes(self) -> bool:
        """True if it predicts the other cells."""
        return bool(self.exact and np.median(self.fit.errors) <= MEDIAN and self.fit.errors.max() <= WORST)


@cache
def fitted_mechanisms() -> tuple[FittedMechanism, ...]:
    """Return every mechanism in each of its workloads."""
    return tuple(fit_mechanism(mechanism, workload) for mechanism in MECHANISMS for workload in mechanism.workloads)


def fit_mechanism(mechanism: Mechanism, workload: Workload) -> FittedMechanism:
    """Return the mechanism with its constants fitted to FITTED, by least squares of relative errors."""
    if not mechanism.start:
        return FittedMechanism(mechanism, RolloutFit(mechanism.engine(), workload), ())

    def residuals(constants: np.ndarray) -> list[float]:
        attempt = RolloutFit(mechanism.engine(*constants.tolist()), workload)
        return [attempt.speedup(*cell[:2], GENERATION[cell][0]) / GENERATION[cell][1] - 1 for cell in FITTED]

    scale = np.array(mechanism.start)
    solution = least_squares(residuals, scale, bounds=(0, np.inf), x_scale=scale, diff_step=0.02, xtol=1e-6, ftol=1e-8)
    constants = tuple(solution.x.tolist())
    return FittedMechanism(mechanism, RolloutFit(mechanism.engine(*constants), workload), constants)

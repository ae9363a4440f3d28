"""The paper's 8B runs (arXiv 2604.26779): generation, steps and asynchrony, under every mechanism that was tried."""

from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np

from benchmarks.simulation.acceptance import bisect, tokens_per_round
from benchmarks.simulation.lengths import Lengths
from benchmarks.simulation.rollout import SlotLayout, simulate
from benchmarks.simulation.surface import Surface
from models.published import DECODERS, eagle3_config
from models.sheets import decoder_sheet, eagle3_sheet
from specjax.cost import EngineProfile, cost_model, find_engine, find_hardware

PROMPT = 300
# Replicas that are simulated; the paper's 32 are alike.
REPLICAS = 8
AUTOREGRESSIVE = {"Zero": 100.0, "Think": 133.6}
# (run, draft length, what differs) -> (acceptance length, speed-up of generation)
GENERATION: dict[tuple[str, int, str], tuple[float, float]] = {
    ("Zero", 3, "DAPO"): (3.32, 1.77),
    ("Zero", 5, "DAPO"): (4.35, 1.44),
    ("Zero", 7, "DAPO"): (5.06, 1.21),
    ("Zero", 3, "UltraChat"): (2.88, 1.51),
    ("Zero", 3, "UltraChat + online"): (3.04, 1.63),
    ("Zero", 3, "DAPO + online"): (3.29, 1.78),
    ("Think", 3, "DAPO"): (2.77, 1.53),
    ("Think", 5, "DAPO"): (3.23, 0.84),
    ("Think", 7, "DAPO"): (3.48, 0.71),
    ("Think", 3, "UltraChat"): (2.40, 1.19),
    ("Think", 3, "UltraChat + online"): (2.55, 1.26),
    ("Think", 3, "DAPO + online"): (2.74, 1.52),
}
FITTED = (("Zero", 3, "DAPO"), ("Zero", 5, "DAPO"))


@dataclass(frozen=True)
class Workload:
    """Rows and lengths of the runs, which the paper does not give.

    Attributes:
        rows:    Rows of a GPU.
        limit:   Most tokens of a completion.
        spreads: Standard deviation of the logarithm of the lengths, Zero's and Think's.
    """

    rows: int
    limit: int
    spreads: tuple[float, float] = (0.9, 0.6)

    def __str__(self) -> str:
        return f"{self.rows} rows, {self.limit:,} tokens"


BASE = Workload(16, 32_768)
WORKLOADS = (
    *(Workload(rows, 32_768) for rows in (8, 16, 32)),
    *(Workload(rows, 20_480) for rows in (32, 64)),
    *(Workload(rows, 16_384, (0.9, 0.4)) for rows in (64, 128)),
)
ROOFLINE = replace(find_engine("specjax"), host=0.3e-3)


@dataclass(frozen=True)
class RolloutFit:
    """A mechanism in a workload: an engine, and the two median lengths that the times without drafts give."""

    engine: EngineProfile
    workload: Workload

    @cached_property
    def medians(self) -> dict[str, float]:
        """Return the median length of each run, before the limit."""
        return {run: _median(self.workload, run, _plain(self.engine)) for run in AUTOREGRESSIVE}

    def seconds(self, run: str, draft_length: int, acceptance: float) -> float:
        """Return the seconds of a rollout."""
        return _seconds(self.workload, run, self.medians[run], self.engine, draft_length, acceptance)

    def speedup(self, run: str, draft_length: int, acceptance: float) -> float:
        """Return the speed-up of generation."""
        return self.seconds(run, 0, 1.0) / self.seconds(run, draft_length, acceptance)

    @cached_property
    def speedups(self) -> dict[tuple[str, int, str], float]:
        """Return the speed-up of every cell of GENERATION."""
        return {cell: self.speedup(*cell[:2], acceptance) for cell, (acceptance, _) in GENERATION.items()}

    @property
    def errors(self) -> np.ndarray:
        """Return the absolute relative errors of the cells that were not fitted."""
        errors = [self.speedups[cell] / GENERATION[cell][1] - 1 for cell in GENERATION if cell not in FITTED]
        return np.abs(errors)


def _plain(engine: EngineProfile) -> EngineProfile:
    """Return the part of an engine that rounds without drafts see, so that their fit is shared.

    No workload has more rows than a captured graph has tokens.
    """
    return replace(engine, name="", source="", draft_pass=0.0, attention=(), captured=None, eager=0.0)


@cache
def _sheets(engine: EngineProfile):
    policy, draft = decoder_sheet(DECODERS["qwen3-8b"]), eagle3_sheet(eagle3_config("qwen3-8b"))
    return cost_model(policy, draft, find_hardware("gb200"), engine=engine)


@cache
def _median(workload: Workload, run: str, engine: EngineProfile) -> float:
    def excess_seconds(log_median: float) -> float:
        return _seconds(workload, run, float(np.exp(log_median)), engine, 0, 1.0) - AUTOREGRESSIVE[run]

    return float(np.exp(bisect(excess_seconds, 4.0, np.log(4.0 * workload.limit))))


def _seconds(
    workload: Workload, run: str, median: float, engine: EngineProfile, draft_length: int, acceptance: float
) -> float:
    spread = workload.spreads[list(AUTOREGRESSIVE).index(run)]
    lengths = Lengths(median, spread, workload.limit).draw((REPLICAS, workload.rows), 0)
    gains = tokens_per_round(acceptance, max(draft_length, 1), (draft_length,), lengths)
    surface = Surface(_sheets(engine).seconds, workload.rows, PROMPT + workload.limit, (draft_length,))
    return simulate(lengths, gains, surface, SlotLayout(workload.rows), PROMPT).seconds

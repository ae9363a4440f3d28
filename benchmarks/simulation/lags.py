"""A sweep of lags as the table that `launch.compare --asynchronous.lag` measures: each lag without drafts and with."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.simulation.answer import Answer, Arm
from benchmarks.simulation.estimate import EstimatedAnswer
from benchmarks.simulation.uncertainty import Interval, interval


class LagRow(NamedTuple):
    """A lag, without drafts or with.

    draft:           what is drafted.
    generation_gpus: GPUs that generate.
    seconds:         by name: `step`, `exposed`, `generation`, `train`.
    step_speedup:    over the first row, from the same samples of the inputs.
    """

    lag: int
    draft: str
    generation_gpus: int
    seconds: dict[str, Interval]
    step_speedup: Interval

    def as_json(self) -> dict[str, Any]:
        """Return the row as JSON."""
        return self._asdict() | {"seconds": {name: list(value) for name, value in self.seconds.items()}}


SECONDS: dict[str, Callable[[Arm], float]] = {
    "step": lambda arm: arm.step,
    "exposed": lambda arm: arm.exposed,
    "generation": lambda arm: arm.generation,
    "train": lambda arm: arm.stages.logprob + arm.stages.train + arm.stages.draft_training,
}


def lag_rows(swept: Sequence[EstimatedAnswer]) -> list[LagRow]:
    """Return two rows for each lag; none unless a sweep changed only the lag and has an answer for each."""
    if any(set(estimate.changes) != {"lag"} or estimate.answer is None for estimate in swept):
        return []
    rows, baseline = list[LagRow](), [each.plain.step for each in _answers(swept[0])]
    for estimate in swept:
        lengths = "/".join(map(str, estimate.point.lengths))
        for draft, name in (("none", "plain"), (f"k = {lengths}", "drafted")):
            arms: list[Arm] = [getattr(answer, name) for answer in _answers(estimate)]
            seconds = {column: _interval([measure(arm) for arm in arms]) for column, measure in SECONDS.items()}
            speedups = [before / arm.step for before, arm in zip(baseline, arms, strict=True)]
            rows.append(LagRow(estimate.point.lag, draft, arms[0].generation_gpus, seconds, _interval(speedups)))
    return rows


def _answers(estimate: EstimatedAnswer) -> list[Answer]:
    """Return the answer in the middle of the ranges, and those of the samples."""
    assert estimate.answer is not None
    return [estimate.answer, *(answer for _, answer in estimate.samples)]


def _interval(values: Sequence[float]) -> Interval:
    return interval(values[0], values[1:])


def lag_table(rows: Sequence[LagRow]) -> Iterator[str]:
    """Yield the lines of the table; none without rows."""
    if not rows:
        return
    yield ""
    yield "seconds of a step; speed-ups over the first row"
    heads = ("GPUs that generate", "step", "exposed generation", "generation", "train", "step x")
    widths = (20, 24, 20, 12, 10, 20)
    yield f"{'lag':>5}{'drafts':>10}" + "".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True))
    for row in rows:
        step, speedup = row.seconds["step"], row.step_speedup
        texts = (
            str(row.generation_gpus),
            f"{step.value:.4g} [{step.low:.4g}, {step.high:.4g}]",
            *(f"{row.seconds[name].value:.3g}" for name in ("exposed", "generation", "train")),
            f"{speedup.value:.2f} [{speedup.low:.2f}, {speedup.high:.2f}]",
        )
        cells = (f"{value:>{width}}" for value, width in zip(texts, widths, strict=True))
        yield f"{row.lag:>5}{row.draft:>10}" + "".join(cells)

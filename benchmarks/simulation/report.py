"""Answers as text and as JSON."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.simulation.answer import accepted
from benchmarks.simulation.estimate import Details, EstimatedAnswer, Threshold
from benchmarks.simulation.held_out import coverage_line
from benchmarks.simulation.lags import lag_rows
from benchmarks.simulation.machine import Evidence, memory
from benchmarks.simulation.options import SimulateArgs
from benchmarks.simulation.point import MEASURED, Point
from benchmarks.simulation.uncertainty import LEVEL, Interval, Range
from specjax.cost import find_engine, find_hardware


def describe(point: Point, evidence: Evidence) -> Iterator[str]:
    """Yield the lines that say what is simulated, and from what."""
    lag = f"lag {point.lag}" if point.lag else "synchronous"
    if point.hardware == MEASURED:
        yield f"a run on its own hardware, {len(evidence.cells)} measured rounds, {point.gpus} data shards, {lag}"
        if evidence.generation_s:
            ratio = evidence.modelled_s / evidence.generation_s
            yield (
                f"generation of the run as it was: measured {evidence.generation_s:.4g} s, modelled "
                f"{evidence.modelled_s:.4g} s, {ratio - 1:+.0%}"
            )
        yield from evidence.notes
    else:
        device, engine = find_hardware(point.hardware), find_engine(point.engine)
        spread = f"tensor {point.tensor}" + (f", expert {point.expert}" if point.expert > 1 else "")
        yield f"{point.model} on {point.gpus} {device.name}, {spread}, {lag}; engine {engine.name}: {engine.source}"
        needs = memory(point, point.prompt_tokens + point.mean_tokens)
        yield (
            f"memory of a device: weights {needs.weights / 1e9:.1f} GB, training state {needs.training / 1e9:.1f} GB, "
            f"a sequence {needs.sequence / 1e9:.2f} GB, of {needs.device / 1e9:.0f} GB; launch.plan compiles the step"
        )
    lengths = f"mean {point.mean_tokens:,.0f} tokens, at most {point.limit_tokens:,}"
    where = f"{len(evidence.lengths)} measured lengths" if evidence.lengths else f"lognormal, {point.length_spread:g}"
    yield f"{point.sequences:,} sequences a step, {lengths} ({where})"
    lengths_tried = sorted({1, 3, 5, 7, *point.lengths} - {0})
    predicted = ", ".join(
        f"k={k} {length:.2f}" for k, length in zip(lengths_tried, accepted(point, lengths_tried), strict=True)
    )
    yield f"acceptance length {point.acceptance_length:.2f} at k = {point.measured_at}; so {predicted}"


def lines_of_point(estimate: EstimatedAnswer, ranges: Mapping[str, Range], details: Details) -> Iterator[str]:
    """Yield the lines of a single answer."""
    yield ""
    yield from step_table(estimate)
    yield ""
    yield (
        f"[low, high] hold {LEVEL:.0%} of samples of the inputs below, each as likely anywhere in its range; all other "
        "values are of the options as given, and of the middle of the ranges of those that are not"
    )
    yield held_out(estimate.point)
    at = estimate.point.measured_at
    yield f"a step is no slower from an acceptance length of {_threshold(details.break_even, at + 1)} at k = {at}"
    if details.worth_of_training is not None:
        raised = _threshold(details.worth_of_training, at + 1 - estimate.point.acceptance_length)
        yield f"training the draft pays if it raises the acceptance length by {raised}"
    yield ""
    yield f"{'the step speed-up depends on':30}{'range':>22}{'speed-up':>18}"
    for swing in details.swings:
        limits = ranges[swing.name]
        between = f"{limits.low:.4g} .. {limits.high:.4g}"
        yield f"  {swing.name:28}{between:>22}{f'{swing.low:.2f} .. {swing.high:.2f}':>18}  {limits.reason}"


def held_out(point: Point) -> str:
    """Return the line on how often intervals held numbers that the model had not seen."""
    if point.hardware == MEASURED:
        return "not held out: the rounds are this run's own"
    return coverage_line(point.engine)


def coverage_lines(rows: Sequence[EstimatedAnswer]) -> Iterator[str]:
    """Yield the lines of `held_out` of all answers, each once."""
    yield from dict.fromkeys(held_out(row.point) for row in rows if row.intervals is not None)


def step_table(estimate: EstimatedAnswer) -> Iterator[str]:
    """Yield the lines of a step without drafts and with, and of its parts."""
    assert estimate.answer is not None and estimate.intervals is not None
    plain, drafted, intervals = estimate.answer.plain, estimate.answer.drafted, estimate.intervals
    k = "/".join(map(str, estimate.point.lengths))
    yield f"{'':24}{'without drafts':>30}{f'with, k = {k}':>30}{'speed-up':>22}"
    for title, name in (("generation, s", "generation"), ("step, s", "step")):
        values = (intervals[f"{arm}_{name}_s"] for arm in ("plain", "drafted"))
        columns = "".join(f"{_show(value, '.4g'):>30}" for value in values)
        yield f"{title:24}{columns}{_show(intervals[f'{name}_speedup'], '.2f'):>22}"
    for title, values in {
        "  exposed generation": (plain.exposed, drafted.exposed),
        "  log-probs": (plain.stages.logprob, drafted.stages.logprob),
        "  training": (plain.stages.train, drafted.stages.train),
        "  training the draft": (plain.stages.draft_training, drafted.stages.draft_training),
        "  moving weights": (plain.stages.movement, drafted.stages.movement),
        "  other": (plain.stages.other, drafted.stages.other),
    }.items():
        yield f"{title:24}" + "".join(f"{value:>30.3g}" for value in values)
    for title, counts in {
        "slots of a replica": ("/".join(map(str, arm.phases or (arm.slots,))) for arm in (plain, drafted)),
        "sequences that wait": (plain.waiting, drafted.waiting),
        "GPUs that generate": (plain.generation_gpus, drafted.generation_gpus),
    }.items():
        yield f"{title:24}" + "".join(f"{count:>30}" for count in counts)
    yield f"{'tokens a verification':24}{plain.acceptance_length:>30.2f}{drafted.acceptance_length:>30.2f}"


def sweep_table(rows: Sequence[EstimatedAnswer]) -> Iterator[str]:
    """Yield the lines of a sweep, one for each point."""
    names = list(rows[0].changes)
    widths = [max(len(name), *(len(_value(row.changes[name])) for row in rows)) + 2 for name in names]
    head = "".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True))
    yield ""
    yield f"{head}{'generation x':>22}{'step x':>22}{'step, s':>24}  depends most on"
    for row in rows:
        line = "".join(f"{_value(row.changes[name]):>{width}}" for name, width in zip(names, widths, strict=True))
        if row.intervals is None:
            yield f"{line}  none: {row.refused}"
            continue
        speedups = [_show(row.intervals[name], ".2f") for name in ("generation_speedup", "step_speedup")]
        seconds = _show(row.intervals["drafted_step_s"], ".4g")
        yield f"{line}{speedups[0]:>22}{speedups[1]:>22}{seconds:>24}  {row.driver or '-'}"


def as_json(
    args: SimulateArgs, rows: Sequence[EstimatedAnswer], ranges: Mapping[str, Range], details: Details | None
) -> dict[str, Any]:
    """Return all results, in seconds and ratios. Each interval is [value in the middle of the ranges, low, high]."""
    return {
        "options": asdict(args),
        "level": LEVEL,
        "held_out": [*coverage_lines(rows)],
        "ranges": {name: each._asdict() for name, each in ranges.items()},
        "answers": [
            {"changes": row.changes, "refused": row.refused, "depends_most_on": row.driver}
            | ({} if row.intervals is None else {name: list(value) for name, value in row.intervals.items()})
            for row in rows
        ],
        "lags": [row.as_json() for row in lag_rows(rows)],
        "details": None if details is None else _details(details),
    }


def _details(details: Details) -> dict[str, Any]:
    """Return details as JSON; null for an acceptance length that is never reached."""
    thresholds = {
        name: {
            "length": [x if math.isfinite(x) else None for x in threshold.length],
            "depends_most_on": threshold.depends_most_on,
        }
        for name in ("break_even", "worth_of_training")
        if (threshold := getattr(details, name)) is not None
    }
    return {"swings": [swing._asdict() for swing in details.swings]} | thresholds


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _threshold(threshold: Threshold, most: float) -> str:
    """Return a threshold as text. most: the largest possible; above it stands for none."""
    value, low, high = (f"{x:.2f}" if math.isfinite(x) else f"above {most:.2f} (never)" for x in threshold.length)
    return f"{value} [{low}, {high}]" + (f" ({threshold.depends_most_on})" if threshold.depends_most_on else "")


def _show(value: Interval, form: str) -> str:
    return f"{value.value:{form}} [{value.low:{form}}, {value.high:{form}}]"

"""How sure an answer is: ranges of the inputs that nobody measured, sampled together and one at a time."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import NamedTuple

import numpy as np

from benchmarks.simulation.answer import Answer, Pair, answer
from benchmarks.simulation.held_out import model_error
from benchmarks.simulation.machine import Evidence
from benchmarks.simulation.point import MEASURED, Point
from specjax.cost import find_engine

# Share of the samples that an interval holds.
LEVEL = 0.9


class Range(NamedTuple):
    """Lowest and highest value of an input, both as likely as any between, and why."""

    low: float
    high: float
    reason: str


class Interval(NamedTuple):
    """A result in the middle of all ranges, and the ends between which `LEVEL` of its samples lie, and it itself."""

    value: float
    low: float
    high: float


class Swing(NamedTuple):
    """An input, changed while all others stay: the result at the low and at the high end of its range."""

    name: str
    low: float
    high: float

    @property
    def size(self) -> float:
        """Absolute change of the result over the range."""
        return abs(self.high - self.low)


Measure = Callable[[Answer], float]


def input_ranges(point: Point, evidence: Evidence, user_ranges: Mapping[str, Range]) -> dict[str, Range]:
    """Return the ranges of a point's inputs by name. user_ranges: ranges that replace these."""
    ranges: dict[str, Range] = {}
    if point.draft_length or point.draft_lengths:
        spread = float(np.std(evidence.steps) / np.sqrt(len(evidence.steps))) if evidence.steps else 0.0
        margin = max((0.3 if evidence.acceptance_assumed else 0.03) * (point.acceptance_length - 1), 2 * spread)
        reason = "extrapolation to other draft lengths is off by up to 3%"
        if evidence.acceptance_assumed:
            reason = "the default, which nobody measured; drafts differ by as much"
        ends = (
            max(point.acceptance_length - margin, 1.0),
            min(point.acceptance_length + margin, point.measured_at + 1.0),
        )
        ranges["acceptance_length"] = Range(*ends, reason)
    mean = point.mean_tokens
    ranges["mean_tokens"] = Range(
        0.85 * mean, min(1.15 * mean, point.limit_tokens), "lengths change as the policy learns"
    )
    if not evidence.lengths:
        ranges["length_spread"] = Range(0.7 * point.length_spread, 1.3 * point.length_spread, "seldom published")
    if point.hardware != MEASURED:
        ranges |= _of_sheets(point)
        if "drafted_factor" not in user_ranges and any(point.lengths):
            error, reason = (
                model_error(point.engine),
                "of ten measured numbers of this engine, nine are within 0.9 of it",
            )
            ranges["drafted_factor"] = Range(1 - error, 1 + error, reason)
    if point.train_s is None:
        reason = "assumed; 0.23 follows from 4,452 tokens/s a GB200 of Qwen3-235B-A22B (Megatron-Bridge 25.09)"
        ranges["training_share"] = Range(0.2, 0.5, reason)
    else:
        ranges["train_s"] = Range(0.95 * point.train_s, 1.05 * point.train_s, "measured steps vary")
    if point.logprob_s is None and point.engine != "specjax":
        ranges["logprob_share"] = Range(0.25, 0.6, "a forward is 1/3 of training; 0.57 to 0.59 in arXiv 2604.26779")
    ranges["other_s"] = Range(0.5 * point.other_s, 1.5 * point.other_s, "depends on the reward")
    ranges = {
        name: Range(_allowed(point, name, each.low), _allowed(point, name, each.high), each.reason)
        for name, each in ranges.items()
    }
    return {name: each for name, each in (ranges | dict(user_ranges)).items() if each.high > each.low}


def _allowed(point: Point, name: str, end: float) -> float:
    """Return the end of a range; the point's own value if the field does not allow it."""
    try:
        replace(point, **{name: end})
    except ValueError:
        return getattr(point, name)
    return end


def _of_sheets(point: Point) -> dict[str, Range]:
    engine = find_engine(point.engine)
    layer = 1e6 * engine.layer if point.layer_us is None else point.layer_us
    draft = 1e6 * engine.draft_pass if point.draft_pass_us is None else point.draft_pass_us
    ranges = {
        "bandwidth_share": Range(0.54, 0.92, "low end: one row of 8,192 positions on our H100; high end: assumed"),
        "compute_share": Range(0.45, 0.75, "assumed"),
        "overlap": Range(0.2, 0.6, "middle: plain rounds of 1 to 64 rows of our H100; width: assumed"),
        "layer_us": Range(layer / 2, layer * 2, "about 8 kernels in a captured program; assumed"),
        "draft_pass_us": Range(0.7 * draft, 1.3 * draft + 100.0, "0.2 to 1 ms in published engines"),
    }
    if engine.host or point.host_us:
        host = 1e6 * engine.host if point.host_us is None else point.host_us
        ranges["host_us"] = Range(0.5 * host, 1.5 * host, "differs by version")
    if point.model.endswith(("a3b", "a22b")):
        ranges["independence"] = Range(0.3, 1.0, "two published sets disagree")
    return ranges


def sample_answers(
    pair: Pair, evidence: Evidence, ranges: Mapping[str, Range], samples: int
) -> list[tuple[dict[str, float], Answer]]:
    """Return inputs drawn from their ranges, with their answers: a Latin hypercube, the same in every call."""
    rng = np.random.default_rng(0)
    columns = {
        name: each.low + (each.high - each.low) * (rng.permutation(samples) + rng.random(samples)) / samples
        for name, each in ranges.items()
    }
    inputs = [{name: float(column[i]) for name, column in columns.items()} for i in range(samples)]
    return [(values, answer(with_inputs(pair, values), evidence, seed=i)) for i, values in enumerate(inputs)]


def strongest_input(samples: Sequence[tuple[Mapping[str, float], Answer]], measure: Measure) -> str | None:
    """Return the input on which a result depends most. See `most_correlated`."""
    return most_correlated([inputs for inputs, _ in samples], [measure(result) for _, result in samples])


def most_correlated(inputs: Sequence[Mapping[str, float]], results: Sequence[float]) -> str | None:
    """Return the input whose ranks among the samples correlate most with the ranks of the result.

    None without inputs, or if all results are the same.
    """
    if max(results) == min(results):
        return None
    ranks = _ranks(results)
    size = {name: abs(np.corrcoef(_ranks([each[name] for each in inputs]), ranks)[0, 1]) for name in inputs[0]}
    return max(size, key=lambda name: size[name], default=None)


def _ranks(values: Sequence[float]) -> np.ndarray:
    return np.argsort(np.argsort(values))


def interval(value: float, samples: Sequence[float]) -> Interval:
    """Return a value with the ends of its samples. They may be infinite; nothing is interpolated then."""
    method = "linear" if np.isfinite(samples).all() else "inverted_cdf"
    low, high = np.quantile(samples, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], method=method).tolist()
    return Interval(value, min(low, value), max(high, value))


def swings(pair: Pair, evidence: Evidence, ranges: Mapping[str, Range], measure: Measure) -> list[Swing]:
    """Return the inputs changed one at a time, the one that changes the result most first."""
    results = [
        Swing(name, *(measure(answer(with_inputs(pair, {name: end}), evidence)) for end in (each.low, each.high)))
        for name, each in ranges.items()
    ]
    return sorted(results, key=lambda swing: -swing.size)


def in_the_middle(pair: Pair, ranges: Mapping[str, Range]) -> Pair:
    """Return the pair with every input that has its default in the middle of its range. Those that are given stay."""
    defaults = {field.name: field.default for field in fields(Point)}
    left = (name for name in ranges if getattr(pair[1], name) == defaults[name])
    return with_inputs(pair, {name: (ranges[name].low + ranges[name].high) / 2 for name in left})


def with_inputs(pair: Pair, values: Mapping[str, float]) -> Pair:
    """Return a resolved pair with inputs changed. Given seconds of training grow with the tokens."""
    grown = {name: value for name, value in values.items() if name == "mean_tokens"}
    others = {name: value for name, value in values.items() if name not in grown}
    plain, drafted = (replace(point, **others).changed(grown) for point in pair)
    return plain, drafted

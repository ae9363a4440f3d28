"""Answers with intervals: for one point, for the points of a sweep, and more of a single point."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.simulation.answer import Answer, Pair, answer, break_even, resolve_pair, worth_of_training
from benchmarks.simulation.machine import Evidence
from benchmarks.simulation.point import Point
from benchmarks.simulation.uncertainty import (
    Interval,
    Range,
    Swing,
    in_the_middle,
    input_ranges,
    interval,
    most_correlated,
    sample_answers,
    strongest_input,
    swings,
    with_inputs,
)


class EstimatedAnswer(NamedTuple):
    """The answer for a point, and how sure it is.

    changes:    what a sweep changed.
    answer:     in the middle of the ranges.
    samples:    inputs drawn from their ranges, with their answers.
    intervals:  over the samples, by name of the result (MEASURES).
    driver:     the input on which the step's speed-up depends most; None if on no input.
    refused:    why there is no answer; the others are None then.
    """

    changes: dict[str, Any]
    point: Point
    answer: Answer | None = None
    samples: Sequence[tuple[dict[str, float], Answer]] = ()
    intervals: dict[str, Interval] | None = None
    driver: str | None = None
    refused: str | None = None


MEASURES = {
    "generation_speedup": lambda answer: answer.generation_speedup,
    "step_speedup": lambda answer: answer.step_speedup,
    "plain_generation_s": lambda answer: answer.plain.generation,
    "drafted_generation_s": lambda answer: answer.drafted.generation,
    "plain_step_s": lambda answer: answer.plain.step,
    "drafted_step_s": lambda answer: answer.drafted.step,
}


class Threshold(NamedTuple):
    """An acceptance length from which something pays, infinite where none does, and the input it depends on most."""

    length: Interval
    depends_most_on: str | None


class Details(NamedTuple):
    """More of a single point.

    swings:            inputs changed one at a time, by how much they move the step's speed-up.
    break_even:        acceptance length from which a step is no slower than without drafts.
    worth_of_training: by how much training the draft must raise the acceptance length; None: it is not trained.
    """

    swings: list[Swing]
    break_even: Threshold
    worth_of_training: Threshold | None


def details_of(
    pair: Pair, evidence: Evidence, ranges: dict[str, Range], samples: Sequence[Mapping[str, float]]
) -> Details:
    """Return more of a single point; `samples` are the samples of its answer."""
    middle = in_the_middle(pair, ranges)

    def threshold(length: Callable[[Pair, Evidence, int], float]) -> Threshold:
        lengths = [length(with_inputs(pair, values), evidence, seed) for seed, values in enumerate(samples)]
        return Threshold(interval(length(middle, evidence, 0), lengths), most_correlated(samples, lengths))

    trained = threshold(worth_of_training) if pair[1].draft_training else None
    changed = swings(middle, evidence, ranges, MEASURES["step_speedup"])
    return Details(changed, threshold(break_even), trained)


def estimate(
    changes: dict[str, Any], pair: Pair, evidence: Evidence, ranges: Mapping[str, Range], samples: int
) -> EstimatedAnswer:
    """Return the answer for a resolved pair, with intervals over samples of the ranges."""
    central = answer(in_the_middle(pair, ranges), evidence)
    sampled = sample_answers(pair, evidence, ranges, samples)
    intervals = {
        name: interval(measure(central), [measure(each) for _, each in sampled]) for name, measure in MEASURES.items()
    }
    return EstimatedAnswer(
        changes, pair[1], central, sampled, intervals, strongest_input(sampled, MEASURES["step_speedup"])
    )


def estimate_changed(
    changes: dict[str, Any], point: Point, evidence: Evidence, user_ranges: Mapping[str, Range], samples: int
) -> EstimatedAnswer:
    """Return the answer for one point of a sweep. A point that does not fit, or that is refused, has none."""
    try:
        changed = point.changed(changes)
        pair = resolve_pair(changed, evidence)
    except ValueError as error:
        return EstimatedAnswer(changes, point, refused=str(error))
    user_ranges = {name: each for name, each in user_ranges.items() if name not in changes}
    ranges = {name: each for name, each in input_ranges(changed, evidence, user_ranges).items() if name not in changes}
    return estimate(changes, pair, evidence, ranges, samples)

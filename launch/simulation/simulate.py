"""Answer each point of a command line, print the answers and write them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from launch.cli.console import console
from launch.cli.errors import refusing
from launch.cli.paths import write_results
from launch.simulation.answer import Answer, Pair, answer, both, break_even, worth_of_training
from launch.simulation.lags import lag_rows, lag_table
from launch.simulation.machine import Evidence
from launch.simulation.options import SimulateArgs, given_ranges, swept
from launch.simulation.plots import save_plots
from launch.simulation.point import Point
from launch.simulation.report import as_json, describe, lines_of_point, sweep_table
from launch.simulation.uncertainty import (
    Interval,
    Range,
    Swing,
    driver,
    interval,
    most_correlated,
    sampled,
    swings,
    unknown,
    with_inputs,
)


class Found(NamedTuple):
    """The answer for a point, and how sure it is.

    changes:    what a sweep changed.
    answer:     that of the point itself.
    samples:    inputs drawn from their ranges, with their answers.
    intervals:  those of samples, by name of the result (MEASURES).
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
    "generation_speedup": lambda found: found.generation_speedup,
    "step_speedup": lambda found: found.step_speedup,
    "plain_generation_s": lambda found: found.plain.generation,
    "drafted_generation_s": lambda found: found.drafted.generation,
    "plain_step_s": lambda found: found.plain.step,
    "drafted_step_s": lambda found: found.drafted.step,
}


def simulate(args: SimulateArgs, evidence: Evidence) -> None:
    """Answer the points of a command line: print, and write the JSON file and plots. Raises ConfigError."""
    given, points = given_ranges(args), swept(args)
    with refusing():
        console.print("\n".join(describe(args.point, evidence)))
    if points == [{}]:
        with refusing():
            pair = both(args.point, evidence)
        ranges = unknown(args.point, evidence, given)
        found = _find({}, pair, evidence, ranges, args.samples)
        details = _details(pair, evidence, ranges, [values for values, _ in found.samples])
        console.print("\n".join(lines_of_point(found, ranges, details)))
        write_results(args.json, as_json(args, [found], ranges, details))
    else:
        rows = [_swept(changes, args, evidence, given) for changes in points]
        console.print("\n".join([*sweep_table(rows), *lag_table(lag_rows(rows))]))
        write_results(args.json, as_json(args, rows, unknown(args.point, evidence, given), None))
    if args.plots is not None:
        save_plots(args.plots, args.point, evidence)


class Threshold(NamedTuple):
    """An acceptance length from which something pays, infinite where none does, and the input it depends on most."""

    length: Interval
    depends_most_on: str | None


class Details(NamedTuple):
    """More of a single point.

    swings:            inputs changed alone, by how much they move the step's speed-up.
    break_even:        acceptance length from which a step is no slower than without drafts.
    worth_of_training: by how much training the draft must raise the acceptance length; None: it is not trained.
    """

    swings: list[Swing]
    break_even: Threshold
    worth_of_training: Threshold | None


def _details(
    pair: Pair, evidence: Evidence, ranges: dict[str, Range], samples: Sequence[Mapping[str, float]]
) -> Details:
    def threshold(length: Callable[[Pair, Evidence, int], float]) -> Threshold:
        lengths = [length(with_inputs(pair, values), evidence, seed) for seed, values in enumerate(samples)]
        return Threshold(interval(lengths), most_correlated(samples, lengths))

    trained = threshold(worth_of_training) if pair[1].draft_training else None
    changed = swings(pair, evidence, ranges, MEASURES["step_speedup"])
    return Details(changed, threshold(break_even), trained)


def _swept(changes: dict[str, Any], args: SimulateArgs, evidence: Evidence, given: dict[str, Range]) -> Found:
    """Return the answer for one point of a sweep. A point that does not fit, or that is refused, has none."""
    try:
        point = args.point.changed(changes)
        pair = both(point, evidence)
    except ValueError as error:
        return Found(changes, args.point, refused=str(error))
    kept = {name: each for name, each in given.items() if name not in changes}
    ranges = {name: each for name, each in unknown(point, evidence, kept).items() if name not in changes}
    return _find(changes, pair, evidence, ranges, args.samples)


def _find(changes: dict[str, Any], pair: Pair, evidence: Evidence, ranges: dict[str, Range], samples: int) -> Found:
    central, drawn = answer(pair, evidence), sampled(pair, evidence, ranges, samples)
    intervals = {name: interval([measure(each) for _, each in drawn]) for name, measure in MEASURES.items()}
    return Found(changes, pair[1], central, drawn, intervals, driver(drawn, MEASURES["step_speedup"]))

"""Options of benchmarks.simulate, and the points that they ask for."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_origin

from benchmarks.simulation.answer import resolve, run
from benchmarks.simulation.from_run import MACHINE_FIELDS, read_evidence
from benchmarks.simulation.machine import Evidence
from benchmarks.simulation.point import MEASURED, Point
from benchmarks.simulation.uncertainty import Range
from launch.cli.fields import Field, fields_of
from launch.cli.options import parse
from launch.cli.paths import check_writable
from launch.costs.cost_table import COST_TABLE
from launch.errors import ConfigError, as_config_error
from specjax.options import at_least, at_most

PROGRAM = "python -m benchmarks.simulate"
# Points of a sweep; more would take hours.
MOST_POINTS = 400


@dataclass(frozen=True)
class SimulateArgs(Point):
    """Options of benchmarks.simulate.

    Attributes:
        from_run: Run directory. Acceptance, lengths, stage times and measured rounds are the run's; options win.
        sweep:    NAME=VALUE,VALUE .. of other options: all combinations are answered.
        ranges:   NAME=LOW,HIGH .. of what is not known. Default: a range for each input, listed with the answer.
        samples:  Samples of an interval.
        json:     File for all results.
    """

    from_run: str | None = None
    sweep: tuple[str, ...] = ()
    ranges: tuple[str, ...] = ()
    samples: Annotated[int, at_least(4), at_most(10_000)] = 48
    json: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_writable("json", self.json)

    @property
    def point(self) -> Point:
        """Return only the point."""
        return Point(**{field.name: getattr(self, field.name) for field in fields(Point)})


def with_run(args: SimulateArgs, argv: Sequence[str]) -> tuple[SimulateArgs, Evidence]:
    """Return the options with the values of their run where `argv` gives none, and what the run measured.

    Raises ConfigError.
    """
    if args.from_run is None:
        if args.hardware == MEASURED:
            raise ConfigError(f"hardware = {MEASURED}: needs --from-run, the run that measured its rounds")
        return args, Evidence(acceptance_assumed=not _is_given(argv, "--acceptance-length"))
    if _sweeps(args, "hardware"):
        raise ConfigError("sweep = hardware: with --from-run, one machine at a time; must be given as --hardware")
    values, evidence = read_evidence(Path(args.from_run))
    if evidence.cells:
        with as_config_error():
            point = resolve(Point(**values), evidence)
        evidence = evidence._replace(modelled_s=run(point, evidence).generation)
    if _is_given(argv, "--draft-length"):
        values["draft_lengths"] = ()
    args = parse(SimulateArgs, argv, PROGRAM, **values)
    if args.hardware == MEASURED:
        if _sweeps(args, "model"):
            raise ConfigError(f"sweep = model: the rounds are those that {args.from_run} measured; needs --hardware")
        if not evidence.cells:
            raise ConfigError(f"from_run = {args.from_run}: holds no {COST_TABLE}; --hardware must name a device")
        return args, evidence
    if not _is_given(argv, "--model") and not _sweeps(args, "model"):
        raise ConfigError("hardware = " + args.hardware + ": with --from-run, needs --model, whose rounds it computes")
    # On other hardware, only acceptance and lengths hold.
    values = {name: value for name, value in values.items() if name not in MACHINE_FIELDS}
    return parse(SimulateArgs, argv, PROGRAM, **values), evidence


def _is_given(argv: Sequence[str], option: str) -> bool:
    return any(word.partition("=")[0] == option for word in argv)


def _sweeps(args: SimulateArgs, name: str) -> bool:
    return any(field.path == name for field, _ in _assignments("sweep", args.sweep))


def sweep_points(args: SimulateArgs) -> list[dict[str, Any]]:
    """Return the changed fields of each point of a sweep; [{}] without one. Raises ConfigError."""
    axes = [*_assignments("sweep", args.sweep)]
    if args.from_run is None and any(MEASURED in values for _, values in axes):
        raise ConfigError(f"sweep = hardware={MEASURED}: needs --from-run, the run that measured its rounds")
    if math.prod(len(values) for _, values in axes) > MOST_POINTS:
        raise ConfigError(f"sweep = {' '.join(args.sweep)}: must have at most {MOST_POINTS} combinations")
    names = [field.path for field, _ in axes]
    return [dict(zip(names, point, strict=True)) for point in itertools.product(*(values for _, values in axes))]


def given_ranges(args: SimulateArgs) -> dict[str, Range]:
    """Return the ranges that options give. Raises ConfigError."""
    ranges: dict[str, Range] = {}
    for field, values in _assignments("ranges", args.ranges):
        if len(values) != 2 or not all(isinstance(value, float) for value in values) or not values[0] <= values[1]:
            raise ConfigError(f"ranges = {field.path}={values}: must be two numbers, LOW,HIGH, of a number")
        with as_config_error():
            _ = [args.point.changed({field.path: value}) for value in values]
        ranges[field.path] = Range(values[0], values[1], "given")
    return ranges


def _assignments(option: str, words: Sequence[str]) -> Iterator[tuple[Field, list[Any]]]:
    point_fields = {field.path: field for field in fields_of(Point) if get_origin(field.kinds[0]) is not tuple}
    for word in words:
        name, equals, values = word.partition("=")
        field = point_fields.get(name.replace("-", "_"))
        if field is None or not equals or not values:
            raise ConfigError(f"{option} = {word}: must be NAME=VALUE,VALUE, NAME one of {', '.join(point_fields)}")
        yield field, [field.read([value]) for value in values.split(",")]

"""Ask what speculation would buy before renting machines: `python -m benchmarks.simulate --hardware h100 --gpus 8`.

Answers for one step, or for a sweep, with an interval over what is not known. `--from-run DIR` asks it of a run.
"""

from benchmarks.simulation.answer import resolve_pair
from benchmarks.simulation.estimate import details_of, estimate, estimate_changed
from benchmarks.simulation.lags import lag_rows, lag_table
from benchmarks.simulation.machine import Evidence
from benchmarks.simulation.options import PROGRAM, SimulateArgs, given_ranges, sweep_points, with_run
from benchmarks.simulation.report import as_json, coverage_lines, describe, lines_of_point, sweep_table
from benchmarks.simulation.uncertainty import input_ranges
from launch.cli.options import parse
from launch.cli.paths import write_results
from launch.cli.program import run_program
from launch.console import console
from launch.errors import as_config_error


def main(argv: list[str]) -> int:
    """Simulate what the command line describes, and return the exit code."""
    args, evidence = with_run(parse(SimulateArgs, argv, PROGRAM, __doc__), argv)
    simulate(args, evidence)
    return 0


def simulate(args: SimulateArgs, evidence: Evidence) -> None:
    """Answer the points of a command line: print, and write the JSON file. Raises ConfigError."""
    user_ranges, changes = given_ranges(args), sweep_points(args)
    with as_config_error():
        console.print("\n".join(describe(args.point, evidence)))
    ranges = input_ranges(args.point, evidence, user_ranges)
    if changes == [{}]:
        with as_config_error():
            pair = resolve_pair(args.point, evidence)
        result = estimate({}, pair, evidence, ranges, args.samples)
        details = details_of(pair, evidence, ranges, [values for values, _ in result.samples])
        console.print("\n".join(lines_of_point(result, ranges, details)))
        write_results(args.json, as_json(args, [result], ranges, details))
    else:
        rows = [estimate_changed(each, args.point, evidence, user_ranges, args.samples) for each in changes]
        console.print("\n".join([*sweep_table(rows), *lag_table(lag_rows(rows)), "", *coverage_lines(rows)]))
        write_results(args.json, as_json(args, rows, ranges, None))


if __name__ == "__main__":
    raise SystemExit(run_program(main))

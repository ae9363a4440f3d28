"""Ask what speculation would buy before renting machines: `python -m launch.simulate --hardware h100 --gpus 8`.

Answers for one step, or for a sweep, with an interval over what is not known. `--from-run DIR` asks it of a run.
"""

from launch.cli.options import parse, run_program
from launch.cli.paths import make_directory
from launch.cli.pyplot import load_pyplot
from launch.simulation.options import PROGRAM, SimulateArgs, with_run
from launch.simulation.simulate import simulate


def main(argv: list[str]) -> int:
    """Simulate what the command line describes, and return the exit code."""
    args, evidence = with_run(parse(SimulateArgs, argv, PROGRAM, __doc__), argv)
    if args.plots is not None:
        load_pyplot()
        make_directory("plots", args.plots)
    simulate(args, evidence)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_program(main))

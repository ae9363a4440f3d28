"""Ask what speculation would buy before renting machines: `python -m launch.simulate --hardware h100 --gpus 8`.

Answers for one step, or for a sweep, with an interval over what is not known. `--from-run DIR` asks it of a run.
"""

from launch.cli.options import run_program
from launch.cli.paths import make_directory
from launch.cli.pyplot import load_pyplot
from launch.simulation.options import read_options
from launch.simulation.simulate import simulate


def main(argv: list[str]) -> int:
    """Simulate what the command line describes, and return the exit code."""
    args, evidence = read_options(argv, __doc__)
    if args.plots is not None:
        load_pyplot()
        make_directory("plots", args.plots)
    simulate(args, evidence)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_program(main))

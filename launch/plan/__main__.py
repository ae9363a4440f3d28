"""Compile a training step for absent GPUs: `python -m launch.plan CONFIG --plan.gpu h200 --plan.gpus 8`.

Prints memory per device, collectives, operations, and what to change if the step does not fit. Needs no weights.
"""

from launch.cli.options import parse_run_and
from launch.cli.program import run_program
from launch.plan.options import PlanArgs
from launch.plan.plan import plan


def main(argv: list[str]) -> int:
    """Plan the run that the command line describes. Return the exit code."""
    config, args = parse_run_and(PlanArgs, argv, "python -m launch.plan", "Compile a training step for absent GPUs.")
    plan(config, args)
    return 0


if __name__ == "__main__":
    raise SystemExit(run_program(main))

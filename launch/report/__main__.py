"""Write the report of a run again: `python -m launch.report DIR`."""

from dataclasses import dataclass
from pathlib import Path

from launch.cli.options import parse
from launch.cli.program import run_program
from launch.report import write_report


@dataclass(frozen=True)
class ReportArgs:
    """Options of launch.report.

    Attributes:
        directory: Run directory. report.html is written into it.
    """

    directory: str


def main(argv: list[str]) -> int:
    """Write the report and print its path."""
    args = parse(ReportArgs, argv, "python -m launch.report", "Write the report of a run again.")
    print(write_report(Path(args.directory)))
    return 0


if __name__ == "__main__":
    raise SystemExit(run_program(main))

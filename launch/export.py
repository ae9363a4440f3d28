"""Write what a run has trained for others to load: `python -m launch.export CONFIG --checkpoint RUN --out DIR`.

CONFIG and the options after it are those of the run. Written is the policy in Hugging Face's layout with its tokenizer,
an MTP head stitched in under the names of its family; or the draft by itself.
"""

from launch.build.experiment import build_experiment
from launch.cli.options import parse_run_and, run_program
from launch.cli.paths import new_output_directory
from launch.cli.reads import EXPORT
from launch.run.export import ExportArgs, export


def main(argv: list[str]) -> int:
    """Write the part of a run's save that is asked for, and print where to."""
    config, own = parse_run_and(ExportArgs, argv, "python -m launch.export", "Write what a run has trained.", EXPORT)
    out = new_output_directory(config)
    export(out, build_experiment(config, training=False), own)
    print(f"{own.checkpoint} -> {out} ({own.part})")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_program(main))

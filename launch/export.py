"""Export a trained policy, draft or adapters: `python -m launch.export RUN --out DIR`.

RUN is the directory of the run. The policy is written in Hugging Face's layout with its tokenizer; an MTP head is
included under the weight names of its family, and adapters are merged into the weights. `--part draft` writes only the
draft, `--part adapters` a PEFT directory.
"""

from launch.cli.options import parse_run_and
from launch.cli.paths import new_output_directory
from launch.cli.program import run_program
from launch.cli.recipe_options import EXPORT
from launch.run.export import ExportArgs, export
from launch.run.pin_references import with_commits
from launch.setup.experiment import build_experiment


def main(argv: list[str]) -> int:
    """Write a part of a run's checkpoint, and print the path."""
    config, args = parse_run_and(
        ExportArgs, argv, "python -m launch.export", "Export a trained policy, draft or adapters.", EXPORT
    )
    out = new_output_directory(config)
    export(out, build_experiment(with_commits(config, args.checkpoint), training=False), args)
    dtype = "dtypes of the run" if args.dtype is None else args.dtype
    print(f"{args.checkpoint} -> {out} ({args.part}, {dtype})")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_program(main))

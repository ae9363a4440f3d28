"""Convert drafts between public dialects and our layout: `python -m launch.convert SOURCE OUT`."""

import jax

from launch.cli.options import parse
from launch.cli.program import run_program
from launch.errors import ConfigError
from launch.exports.conversion import ConvertArgs, convert


def main(argv: list[str]) -> int:
    """Convert the source and print the path of the result."""
    args = parse(ConvertArgs, argv, "python -m launch.convert")
    # Conversion computes nothing, so the networks need not fit an accelerator.
    jax.config.update("jax_platforms", "cpu")
    try:
        layout = convert(args)
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError(str(error)) from error
    print(f"{args.source} -> {args.out} ({layout} layout)")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_program(main))

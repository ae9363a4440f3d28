"""Benchmark decoding, drafting, layout, gradients and other samplers: `python -m benchmarks.bench [--preset NAME]`."""

from dataclasses import replace
from pathlib import Path

from benchmarks.bench.models import check_grid, random_networks
from benchmarks.bench.options import SECTIONS, BenchArgs
from benchmarks.bench.plots import save_plots
from benchmarks.bench.presets import find_preset
from benchmarks.bench.report import Results
from benchmarks.plotting import load_pyplot, make_directory
from launch.cli.options import parse
from launch.cli.program import run_program
from launch.errors import as_config_error


def main(argv: list[str]) -> int:
    """Measure the chosen sections. Write the results after every turn, and print each section when it is done."""
    options = parse(BenchArgs, argv, "python -m benchmarks.bench", __doc__)
    if options.plots is not None:
        load_pyplot()
        make_directory("plots", options.plots)
    name, preset = find_preset(options.preset)
    grid = "batches", "contexts", "draft_lengths", "rates", "repeats"
    overrides = {name: getattr(options, name) for name in grid}
    preset = replace(preset, **{name: value for name, value in overrides.items() if value})
    with as_config_error():
        check_grid(preset)
    results = Results("benchmarks.bench", name, Path(options.json) if options.json else None)
    networks = random_networks(preset)
    for section in dict.fromkeys(options.sections or SECTIONS):
        results.follow(section, SECTIONS[section](networks, preset))
        if options.plots is not None:
            save_plots(Path(options.plots), {section: results.sections[section]})
    return 0


if __name__ == "__main__":
    raise SystemExit(run_program(main))

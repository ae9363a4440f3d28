"""Decoding against the memory floor, against itself and against peers: `python -m launch.bench [--preset NAME]`."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from launch.bench.models import Networks, random_networks
from launch.bench.plots import save_plots
from launch.bench.presets import PRESETS, Preset, find_preset
from launch.bench.report import Section, as_json, print_section
from launch.bench.sections.decoding import draft, floor, verify
from launch.bench.sections.generation import acceptance
from launch.bench.sections.layout import layout
from launch.bench.sections.peers import peers, rollouts
from launch.bench.sections.trained import trained
from launch.cli.options import parse, run_program
from launch.cli.paths import check_writable, make_directory
from launch.cli.pyplot import load_pyplot
from launch.timing import format_provenance
from specjax.checkpoint import Which

SECTIONS: dict[str, Callable[[Networks, Preset], Section]] = {
    "floor": floor,
    "verify": verify,
    "draft": draft,
    "acceptance": acceptance,
    "layout": layout,
    "peers": peers,
    "rollouts": rollouts,
}
# Beside them where a checkpoint is given.
TRAINED = "trained"
# Of the widest table: what a narrower terminal wraps is still better than numbers that are cut.
WIDTH = 150


@dataclass(frozen=True)
class BenchArgs:
    """Options of launch.bench.

    Attributes:
        preset:          networks and what is varied: tiny, 25m, qwen3-0.6b, qwen3-1.7b or qwen3-8b; None takes 25m on a
                         CPU and qwen3-8b elsewhere.
        sections:        of floor, verify, draft, acceptance, layout, peers, rollouts; empty for all of them. With a
                         checkpoint trained is always among them, and may be the only one.
        batches:         rows decoded together in floor, verify and draft; empty for the preset's.
        contexts:        positions that each of them can see; empty for the preset's.
        repeats:         measurements of each thing, in turns; None takes the preset's.
        json:            a file for everything that was measured.
        plots:           a directory for plots; needs matplotlib.
        checkpoint:      the directory of a run, whose draft is measured too, at the acceptance that it reaches.
        checkpoint_step: which of its saves: newest, best (by checkpoint.best of the run) or a step.
        recipe:          the CONFIG that the run was started with.
    """

    preset: str | None = None
    sections: tuple[str, ...] = ()
    batches: tuple[int, ...] = ()
    contexts: tuple[int, ...] = ()
    repeats: int | None = None
    json: str | None = None
    plots: str | None = None
    checkpoint: str | None = None
    checkpoint_step: Which = "newest"
    recipe: str | None = None

    def __post_init__(self) -> None:
        if self.preset is not None and self.preset not in PRESETS:
            raise ValueError(f"preset = {self.preset}: must be one of {', '.join(PRESETS)}")
        for name in self.sections:
            if name not in (*SECTIONS, TRAINED):
                raise ValueError(f"sections = {name}: must be of {', '.join((*SECTIONS, TRAINED))}")
        for name in ("batches", "contexts"):
            for value in getattr(self, name):
                if value < 1:
                    raise ValueError(f"{name} = {value}: must be at least 1")
        if self.repeats is not None and self.repeats < 1:
            raise ValueError(f"repeats = {self.repeats}: must be at least 1")
        if (self.checkpoint is None) != (self.recipe is None):
            raise ValueError(f"checkpoint = {self.checkpoint}, recipe = {self.recipe}: must be given together")
        if TRAINED in self.sections and self.checkpoint is None:
            raise ValueError(f"sections = {TRAINED}: needs checkpoint and recipe")
        check_writable("json", self.json)


def main(argv: list[str]) -> int:
    """Measure section by section, and print each as it is done."""
    options = parse(BenchArgs, argv, "python -m launch.bench", __doc__)
    if options.plots is not None:
        load_pyplot()
        make_directory("plots", options.plots)
    name, preset = find_preset(options.preset)
    given = {name: getattr(options, name) for name in ("batches", "contexts", "repeats")}
    preset = replace(preset, **{name: value for name, value in given.items() if value})
    chosen = {name: SECTIONS[name] for name in options.sections or SECTIONS if name != TRAINED}
    if options.checkpoint is not None and options.recipe is not None:
        save = Path(options.checkpoint), options.checkpoint_step
        chosen[TRAINED] = trained(*save, options.recipe, preset.batch)
    console = Console(highlight=False, soft_wrap=True, markup=False, width=WIDTH)
    console.print(f"{format_provenance('launch.bench')}\npreset    {name}\n")
    networks, found = random_networks(preset), {}
    for section, measure in chosen.items():
        with console.status(section):
            found[section] = measure(networks, preset)
        print_section(found[section], console)
        if options.json is not None:
            Path(options.json).write_text(json.dumps(as_json(name, found), indent=2) + "\n", encoding="utf-8")
        if options.plots is not None:
            save_plots(Path(options.plots), {section: found[section]})
    return 0


if __name__ == "__main__":
    raise SystemExit(run_program(main))

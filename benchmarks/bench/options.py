"""Sections and options of benchmarks.bench."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated

from benchmarks.bench.models import BenchNetworks
from benchmarks.bench.presets import PRESETS, Preset
from benchmarks.bench.report import BenchSection
from benchmarks.bench.sections.decoding import draft, floor, verify
from benchmarks.bench.sections.generation import acceptance
from benchmarks.bench.sections.layout import layout
from benchmarks.bench.sections.peers import peers, rollouts
from benchmarks.bench.sections.update import update
from launch.cli.paths import check_writable
from specjax.options import Fraction, Options, Positive, at_least, at_most

# Each yields its section after every turn.
SECTIONS: dict[str, Callable[[BenchNetworks, Preset], Iterator[BenchSection]]] = {
    "floor": floor,
    "verify": verify,
    "draft": draft,
    "acceptance": acceptance,
    "layout": layout,
    "update": update,
    "peers": peers,
    "rollouts": rollouts,
}


@dataclass(frozen=True)
class BenchArgs(Options):
    """Options of benchmarks.bench.

    Attributes:
        preset:        Networks and grid: tiny, 25m, qwen3-0.6b, qwen3-1.7b, qwen3-8b or qwen3-8b-8-layers. Default:
                       25m on a CPU, qwen3-8b elsewhere.
        sections:      Sections to measure: floor, verify, draft, acceptance, layout, update, peers, rollouts.
                       Default: all.
        batches:       Rows decoded together in floor, verify and draft. Default: the preset's.
        contexts:      Positions that each row attends to in these sections, and tokens of a row in update. Default:
                       the preset's.
        draft_lengths: Draft lengths above 0 of the EAGLE-3 head in draft, acceptance and peers. Default: the preset's.
        rates:         Acceptance that acceptance forces, and that draft predicts for. Default: the preset's.
        repeats:       Measurements of each variant, interleaved with the others. Default: the preset's.
        json:          File for all results.
        plots:         Directory for plots; needs matplotlib.
    """

    preset: str | None = None
    sections: tuple[str, ...] = ()
    batches: tuple[Positive, ...] = ()
    contexts: tuple[Positive, ...] = ()
    draft_lengths: tuple[Annotated[int, at_least(1), at_most(128)], ...] = ()
    rates: tuple[Fraction, ...] = ()
    repeats: Positive | None = None
    json: str | None = None
    plots: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.preset is not None and self.preset not in PRESETS:
            raise ValueError(f"preset = {self.preset}: must be one of {', '.join(PRESETS)}")
        for name in self.sections:
            if name not in SECTIONS:
                raise ValueError(f"sections = {name}: must be one of {', '.join(SECTIONS)}")
        check_writable("json", self.json)

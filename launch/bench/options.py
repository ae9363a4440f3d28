"""Sections and options of launch.bench."""

from collections.abc import Callable
from dataclasses import dataclass

from launch.bench.models import Networks
from launch.bench.presets import PRESETS, Preset
from launch.bench.report import Section
from launch.bench.sections.decoding import draft, floor, verify
from launch.bench.sections.generation import acceptance
from launch.bench.sections.layout import layout
from launch.bench.sections.peers import peers, rollouts
from launch.cli.paths import check_writable
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
# Another one, which needs a checkpoint: launch.bench.sections.trained.
TRAINED = "trained"


@dataclass(frozen=True)
class BenchArgs:
    """Options of launch.bench.

    Attributes:
        preset:          networks and what is varied: tiny, 25m, qwen3-0.6b, qwen3-1.7b or qwen3-8b. None: 25m on a CPU,
                         qwen3-8b elsewhere.
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

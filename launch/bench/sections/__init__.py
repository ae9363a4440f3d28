"""What launch.bench measures, section by section."""

from collections.abc import Callable

from launch.bench.models import Networks
from launch.bench.presets import Preset
from launch.bench.report import Section
from launch.bench.sections.decoding import draft, floor, verify
from launch.bench.sections.generation import acceptance
from launch.bench.sections.layout import layout
from launch.bench.sections.peers import peers, rollouts

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

"""Options that are given and do nothing beside others. They are said, not refused: a recipe may hold any of them."""

from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from configs.schema import BLOCKS, RunConfig
from launch.cli.recipe_options import TRAIN, reads
from specjax.options import show


class Ignored(NamedTuple):
    """Options, as patterns of launch.cli.recipe_options, that do nothing where another one has one of these values."""

    options: Sequence[str]
    decider: str
    values: Collection[Any]


IGNORED = (
    Ignored(("draft.unroll",), "draft.kind", (*BLOCKS, "none")),
    Ignored(("draft.loss", "draft.decay", "draft_training", "draft_optimizer"), "draft.kind", ("none",)),
    Ignored(("model.feature_layers",), "draft.kind", ("none", "model", "mtp")),
    Ignored(("draft.lookup.kept",), "draft.lookup.kind", ("none", "ngram")),
    Ignored(("loss.kl_estimator",), "loss.kl_coefficient", (0,)),
    Ignored(("hosts.coordinator",), "hosts.count", (1,)),
)
# Other programs may distil where a run would not.
IGNORED_BY_RUNS = (
    Ignored(("warmup",), "warmup.steps", (0,)),
    Ignored(("distill",), "distill.steps", (0,)),
    Ignored(("checkpoint",), "checkpoint.every", (0,)),
)


def without_effect(recipe: RunConfig, config: RunConfig, given: Mapping[str, Any], reading: Sequence[str]) -> list[str]:
    """Return a line for each given option that does nothing in the config, unless the recipe has the same value.

    given:   values by path of the option.
    reading: the recipe's options that the program reads.
    """
    lines = dict[str, str]()
    for options, decider, values in IGNORED + (IGNORED_BY_RUNS if reading == TRAIN else ()):
        if (decided := attrgetter(decider)(config)) not in values:
            continue
        for name, value in given.items():
            if name != decider and reads(options, name) and attrgetter(name)(recipe) != value:
                lines[name] = f"{name} = {show(value)}: has no effect with {decider} = {decided}"
    return [*lines.values()]

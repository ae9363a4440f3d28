"""Options that are given and do nothing beside others. They are said, not refused: a recipe may hold any of them."""

import os
from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from configs.schema import KINDS, RunConfig
from configs.schema.rewards import ON_DEVICE
from launch.cli.recipe_options import TRAIN, reads
from launch.jobs.hosts import launched_by_a_cluster
from specjax.options import show


class Ignored(NamedTuple):
    """Options, as patterns of launch.cli.recipe_options, that do nothing where others all have one of these values."""

    options: Sequence[str]
    where: Mapping[str, Collection[Any]]


IGNORED = (
    Ignored(("draft_training", "draft_optimizer"), {"draft.kind": ("none",)}),
    Ignored(
        ("model.feature_layers",), {"draft.kind": [name for name, kind in KINDS.items() if kind.feature_layers is None]}
    ),
    Ignored(("draft.lookup.kept",), {"draft.lookup.kind": ("none", "ngram")}),
    Ignored(("loss.kl_estimator",), {"loss.kl_coefficient": (0,)}),
    Ignored(("hosts.coordinator",), {"hosts.count": (1,)}),
    Ignored(("reward.workers", "reward.time_limit_s"), {"reward.scorer": ON_DEVICE}),
    Ignored(("teacher",), {"teacher.kind": ("none",)}),
    Ignored(("rollout.turns", "environment"), {"environment.function": (None,), "environment.tools": ((),)}),
)
# Other programs may distil where a run would not.
IGNORED_BY_RUNS = (
    Ignored(("warmup",), {"warmup.steps": (0,)}),
    Ignored(("distill",), {"distill.steps": (0,)}),
    Ignored(("draft_optimizer",), {"draft_training.mode": ("frozen",), "distill.steps": (0,)}),
    Ignored(("checkpoint",), {"checkpoint.every": (0,)}),
    # Distillation evaluates the draft on the held-out prompts.
    Ignored(("eval",), {"eval.every": (0,), "distill.steps": (0,)}),
    Ignored(("log.samples_every",), {"log.samples": (0,)}),
)
# A cluster may start several processes without `hosts`.
IGNORED_ALONE = (Ignored(("hosts.silence", "hosts.heartbeat"), {"hosts.count": (1,)}),)


def without_effect(recipe: RunConfig, config: RunConfig, given: Mapping[str, Any], reading: Sequence[str]) -> list[str]:
    """Return a line for each given option that does nothing in the config, unless the recipe has the same value.

    given:   values by path of the option.
    reading: the recipe's options that the program reads.
    """
    ignored = IGNORED + (IGNORED_BY_RUNS if reading == TRAIN else ())
    ignored += () if launched_by_a_cluster(os.environ) else IGNORED_ALONE
    lines = dict[str, str]()
    for options, where in ignored:
        values = {name: attrgetter(name)(config) for name in where}
        if not all(values[name] in where[name] for name in where):
            continue
        because = " and ".join(f"{name} = {value}" for name, value in values.items())
        for name, value in given.items():
            if name not in where and reads(options, name) and attrgetter(name)(recipe) != value:
                lines.setdefault(name, f"{name} = {show(value)}: has no effect with {because}")
    return [*lines.values()]

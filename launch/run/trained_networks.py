"""Networks worth measuring: those of a run's save, or those with which a run would begin."""

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from launch.build.experiment import Experiment
from launch.distillation.trainer import check_distillation, distill
from launch.run.directory import restore_params
from launch.run.supervised_warmup import check_warmup, warm_up
from specjax.checkpoint import Which
from specjax.types import Params


def trained_networks(experiment: Experiment, checkpoint: str | None, which: Which, console: Console) -> Params:
    """Return the networks of a run's save, or without one those of the recipe, warmed up and distilled.

    A draft with random weights is distilled even if the recipe does not: it would be accepted by chance alone.
    Raises ConfigError, before anything is trained, if that is impossible.
    """
    if checkpoint is not None:
        return restore_params(Path(checkpoint), experiment, which)
    config, networks = experiment.config, experiment.networks
    random = networks.draft.read_from is None and networks.draft.has_params
    distils = random or config.distill.steps > 0
    check_warmup(experiment)
    if distils:
        check_distillation(experiment)
    params = warm_up(experiment, console.print)
    if not distils:
        return params
    if not config.distill.steps:
        console.print(
            "the draft has random weights: distilled first, as launch.distill would (--checkpoint takes a run's)"
        )
    return replace(params, draft=distill(experiment, params, console.print).draft)

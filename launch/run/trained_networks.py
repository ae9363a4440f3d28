"""Networks to measure: those of a run's checkpoint, or those with which a run would start."""

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from launch.cli.unfinished import Unfinished
from launch.distillation.trainer import check_distillation, distill
from launch.run.restore import restore_params
from launch.run.supervised_warmup import check_warmup, warm_up
from launch.setup.experiment import Experiment
from specjax.checkpoint import Which
from specjax.types import Params


def trained_networks(
    experiment: Experiment, checkpoint: str | None, which: Which, console: Console, unfinished: Unfinished
) -> Params:
    """Return the networks of a run's checkpoint; without one, the recipe's after warm-up and distillation.

    A draft with random weights is distilled even if the recipe does not ask for it: otherwise only chance would accept
    its tokens. Raises ConfigError, before anything is trained, if that is impossible.
    """
    if checkpoint is not None:
        return restore_params(Path(checkpoint), experiment, which)
    config, networks = experiment.config, experiment.networks
    random = networks.draft.read_from is None and networks.draft.has_params
    distils = random or config.distill.steps > 0
    check_warmup(experiment)
    if distils:
        check_distillation(experiment)
    params = warm_up(experiment, unfinished)
    if not distils:
        return params
    if not config.distill.steps:
        console.print(
            "the draft has random weights: distilled first, as launch.distill does (or pass --checkpoint RUN)"
        )
    return replace(params, draft=distill(experiment, params, unfinished).draft)

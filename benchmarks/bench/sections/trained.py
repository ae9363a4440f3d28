"""Section on a trained run: speed-up with its draft on its held-out prompts."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.bench.models import Networks
from benchmarks.bench.presets import Preset
from benchmarks.bench.report import Section
from benchmarks.bench.sections.generation import NOTES, speedups
from launch.build.experiment import build_experiment
from launch.cli.errors import ConfigError
from launch.cli.recipes import load_recipe
from launch.run.restore import restore_params
from specjax.checkpoint import Which
from specjax.drafters import NoDrafter
from specjax.parallel.mesh import MeshConfig


def trained(directory: Path, which: Which, recipe: str, batch: int) -> Callable[[Networks, Preset], Section]:
    """Load the run and return the function that measures its section. Raises ConfigError for bad input.

    batch: held-out prompts that are decoded together.
    """
    experiment = build_experiment(replace(load_recipe(recipe), mesh=MeshConfig()))
    if (function := experiment.config.rollout.function) is not None:
        raise ConfigError(f"rollout.function = {function}: must be unset, only the built-in rollout is measured")
    built = experiment.networks
    if built.decoder is None or isinstance(built.drafter, NoDrafter):
        raise ConfigError(f"recipe = {recipe}: must have a draft and a built-in policy")
    networks = Networks(
        built.decoder, built.policy, built.drafter, restore_params(directory, experiment, which), experiment.mesh
    )
    rollout = replace(experiment.config.rollout, group_size=1, draft_lengths=(), phases=())

    if (usable := len(experiment.held_out_prompts.rows)) < batch:
        raise ConfigError(f"recipe = {recipe}: has {usable} usable held-out prompts, must be at least {batch}")

    def measure(_: Networks, preset: Preset) -> Section:
        prompts = experiment.held_out_prompts.batch(np.arange(batch))
        title = f"speed-up of {directory}, held-out prompts, batch {batch}"
        return Section(title, speedups(networks, prompts, preset, rollout, None), NOTES)

    return measure

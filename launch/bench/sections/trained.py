"""Section on a trained run: speed-up at the acceptance of its own draft, on its held-out prompts."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from launch.bench.models import Networks
from launch.bench.presets import Preset
from launch.bench.report import Section
from launch.bench.sections.generation import NOTES, speedups
from launch.build.experiment import build_experiment
from launch.cli.errors import ConfigError
from launch.cli.recipes import load_recipe
from launch.run.restore import restore_params
from specjax.checkpoint import Which
from specjax.drafters import NoDrafter
from specjax.parallel.mesh import MeshConfig


def trained(directory: Path, which: Which, recipe: str, batch: int) -> Callable[[Networks, Preset], Section]:
    """Read the run and return its section. Raises ConfigError for bad input before anything is measured."""
    experiment = build_experiment(replace(load_recipe(recipe), mesh=MeshConfig()))
    if (named := experiment.config.rollout.function) is not None:
        raise ConfigError(f"rollout.function = {named}: must be unset, only the built-in rollout is measured")
    own = experiment.networks
    if own.decoder is None or isinstance(own.drafter, NoDrafter):
        raise ConfigError(f"recipe = {recipe}: has no draft of a built-in policy to measure")
    networks = Networks(
        own.decoder, own.policy, own.drafter, restore_params(directory, experiment, which), experiment.mesh
    )
    rollout = replace(experiment.config.rollout, group_size=1, draft_lengths=(), phases=())

    if (found := len(experiment.held_out_prompts.rows)) < batch:
        raise ConfigError(f"recipe = {recipe}: has {found} held-out prompts that can be used, must be at least {batch}")

    def measure(_: Networks, preset: Preset) -> Section:
        prompts = jax.tree.map(jnp.asarray, experiment.held_out_prompts.batch(np.arange(batch)))
        title = f"speed-up of {directory}, held-out prompts, batch {batch}"
        return Section(title, speedups(networks, prompts, preset, rollout, None), NOTES)

    return measure

"""Read the networks of a run's checkpoint, or build the ones with which a run starts."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from configs.schema import KINDS
from launch.cli.paths import CHECKPOINTS, check_checkpoint
from launch.distillation.trainer import check_distillation, distill
from launch.errors import ConfigError
from launch.phases.progress import Progress
from launch.run.history import METRICS_FILE, records_of
from launch.run.supervised_warmup import check_warmup, warm_up
from launch.setup.experiment import Experiment
from specjax.checkpoint import Checkpointer, Which
from specjax.types import Params, PyTree


def params_of(checkpoint: str | None, experiment: Experiment, which: Which = "newest") -> Params:
    """Return the networks of a run's checkpoint, or without one the recipe's initial networks."""
    return experiment.networks.params if checkpoint is None else restore_params(Path(checkpoint), experiment, which)


def without_idle_draft(
    checkpoint: str | None, experiment: Experiment, which: Which = "newest"
) -> tuple[Experiment, list[str]]:
    """Return the experiment, and [] or, if it goes on without its draft, the reason.

    A draft is left out if it has random weights, or if the run did not use it in the step of its checkpoint.
    """
    config, draft = experiment.config, experiment.networks.draft
    if checkpoint is None and config.draft.kind in KINDS and draft.read_from is None and draft.has_params:
        return experiment.without_draft(keeps_lookup=True), ["without the draft: it has random weights"]
    if checkpoint is not None and config.rollout.draft_lengths:
        step = saved_step(Path(checkpoint), which)
        for record in records_of(Path(checkpoint) / METRICS_FILE):
            if record["step"] == step and record.get("rollout/draft_length") == 0:
                return experiment.without_draft(), [f"without the draft: the run did not use it in step {step}"]
    return experiment, []


def restore_params(directory: Path, experiment: Experiment, which: Which = "newest") -> Params:
    """Return the networks of a run's checkpoint, on the mesh of `experiment`, without the drafter's memory of prompts.

    Raises ConfigError, naming the option `checkpoint`, if there is no checkpoint of such networks.
    """
    with _saves(directory) as saves:
        params, extra = saves.restore_params(_abstract(experiment.networks.params), which)
    check_base(f"checkpoint = {directory}", experiment, extra)
    if extra["draft_vocabulary"] != experiment.draft_vocabulary:
        raise ConfigError(f"checkpoint = {directory}: its problems differ, and so does its draft vocabulary")
    return replace(params, base=experiment.networks.params.base)


def restore_policy(directory: Path, experiment: Experiment, which: Which = "newest") -> PyTree:
    """Return the policy of a run's checkpoint, or its adapters, whatever its draft."""
    with _saves(directory) as saves:
        policy, extra = saves.restore_policy(_abstract(experiment.networks.params.policy), which)
    check_base(f"checkpoint = {directory}", experiment, extra)
    return policy


def check_base(source: str, experiment: Experiment, extra: Mapping[str, Any]) -> None:
    """Raise ConfigError if adapters of a checkpoint belong to other weights. extra: what it stores beside arrays."""
    expected, found = extra.get("base"), experiment.networks.base_hash
    if expected != found:
        raise ConfigError(
            f"{source}: its adapters were trained beside weights with the hash {expected}; the weights of model.path = "
            f"{experiment.config.model.path} in model.dtype = {experiment.config.model.dtype} have {found}"
        )


def saved_step(directory: Path, which: Which = "newest") -> int:
    """Return the step of the checkpoint that `restore_params` reads."""
    with _saves(directory) as saves:
        return saves.step_of(which)


def trained_networks(experiment: Experiment, checkpoint: str | None, which: Which, console: Console) -> Params:
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
    params = warm_up(experiment)
    if not distils:
        return params
    if not config.distill.steps:
        console.print("the draft has random weights: distilled first, as launch.distill does (or give a run as CONFIG)")
    return replace(params, draft=distill(experiment, params).draft)


@contextlib.contextmanager
def _saves(directory: Path) -> Iterator[Checkpointer]:
    """Yield the checkpoints of a run for reading. Turn errors into ConfigError that names the option `checkpoint`."""
    check_checkpoint(str(directory), "newest")
    try:
        with (
            Progress("loading of a checkpoint", 1, "checkpoints", quiet=True) as progress,
            Checkpointer(directory / CHECKPOINTS) as saves,
        ):
            yield saves
            progress.advance()
    except ValueError as error:
        raise ConfigError(f"checkpoint: {error}") from error


def _abstract(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)

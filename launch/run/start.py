"""How a run begins: with a policy that warms up and a draft that is distilled, or where its last save left it."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console

from configs.schema import RunConfig
from launch.build.experiment import Experiment
from launch.build.state import fresh_state
from launch.cli.errors import ConfigError
from launch.comparison.best_plans import check_plans
from launch.costs.cost_table import CostTable, load_cells
from launch.data.batches import PromptPipeline
from launch.data.supervised import check_supervised
from launch.distillation.trainer import check_distillation, distill
from launch.evaluation.sampler import Evaluate
from launch.run.supervised_warmup import warm_up
from launch.run.wandb import check_wandb
from specjax.checkpoint import Checkpointer
from specjax.cost import Cell
from specjax.parallel.mesh import batch_shards
from specjax.types import Params, TrainState

# What the best save can be the best by, beside the parts of a reward.
HIGHER_IS_BETTER = ("eval/accuracy", "reward/mean", "reward/accuracy", "rollout/acceptance_length")


class Begun(NamedTuple):
    """step: the last one that is done. accuracy: on held-out prompts before RL, a share; None where not evaluated."""

    state: TrainState
    step: int
    accuracy: float | None


def checked(experiment: Experiment, continuing: bool) -> list[Cell]:
    """The costs to choose by that are known already. Raises ConfigError where options clash: nothing is made yet.

    continuing: from a save.
    """
    config = experiment.config
    if config.cost_table is not None and not config.rollout.draft_lengths:
        raise ConfigError(f"cost_table = {config.cost_table}: must be none without rollout.draft_lengths")
    check_wandb(config.log.wandb_project)
    if config.warmup.steps and not continuing:
        check_supervised(
            experiment.problems.train, experiment.tokenizer, config.warmup.batch_size, warmup_length(experiment)
        )
    if config.distill.steps and not continuing:
        check_distillation(experiment)
    _check_best(config)
    check_plans(config.speedup, experiment.held_out_prompts, config.draft, batch_shards(experiment.mesh))
    # A resumed run keeps to the cells in its checkpoint.
    if config.cost_table is None or continuing:
        return []
    return load_cells(Path(config.cost_table), experiment.phases, config.rollout.draft_lengths)


def _check_best(config: RunConfig) -> None:
    best, saved, measured = config.checkpoint.best, config.checkpoint.every, config.eval.every
    names = (*HIGHER_IS_BETTER, *(f"reward/{name}" for name in config.reward.parts))
    if best is not None and best not in names:
        raise ConfigError(f"checkpoint.best = {best}: must be one of {', '.join(names)}")
    if best == "eval/accuracy" and (not measured or saved % measured):
        raise ConfigError(
            f"checkpoint.every = {saved}: must be a multiple of eval.every = {measured} for checkpoint.best = {best}, "
            "and that not 0"
        )


def begin(experiment: Experiment, evaluate: Evaluate, costs: CostTable | None, console: Console) -> Begun:
    """A new run, before its first step."""
    config, params = experiment.config, warmed_up(experiment, console)
    if config.distill.steps:
        params = replace(params, draft=distill(experiment, params, console.print).draft)
    state = fresh_state(experiment, params, None if costs is None else costs.update(params, 0))
    return Begun(state, 0, evaluate(state.params) if config.eval.every else None)


def warmed_up(experiment: Experiment, console: Console) -> Params:
    """The networks as the recipe starts them, behind its supervised steps where it has any."""
    config, params = experiment.config, experiment.networks.params
    if not config.warmup.steps:
        return params
    policy = warm_up(
        experiment.networks.policy,
        params.policy,
        experiment.problems.train,
        experiment.tokenizer,
        warmup_length(experiment),
        config.warmup,
        config.seed,
        experiment.mesh,
        report=lambda step, loss: console.print(f"warm-up step {step}: loss {loss:.3f}"),
        logit_chunk=config.logit_chunk,
    )
    return replace(params, policy=policy)


def resume(
    experiment: Experiment, saves: Checkpointer, pipeline: PromptPipeline, costs: CostTable | None, console: Console
) -> Begun:
    """Restore the run from its newest save, `pipeline` and `costs` too, and free the networks of `experiment`.

    Raises ConfigError where it does not fit.
    """
    config = experiment.config
    lengths = config.rollout.draft_lengths
    seconds = np.ones((len(experiment.phases), len(lengths)), np.float32) if lengths else None
    fresh = fresh_state(experiment, experiment.networks.params, seconds)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), fresh)
    # Else the networks that the recipe starts with, and their moments, would take memory for as long as the run lasts.
    for x in jax.tree.leaves(fresh):
        x.delete()
    try:
        checkpoint = saves.restore(abstract)
    except ValueError as error:
        raise ConfigError(f"resume: {error}") from error
    # Saves from before it was kept do not tell.
    if checkpoint.extra.get("problems", experiment.checksum) != experiment.checksum:
        raise ConfigError("resume: the problems to train on are not those of the run: data or tokenizer have changed")
    pipeline.set_state(checkpoint.data)
    console.print(f"resumed after step {checkpoint.step}")
    if costs is not None:
        costs.resume([Cell(*cell) for cell in checkpoint.extra["cost_cells"]], checkpoint.step)
    return Begun(checkpoint.state, checkpoint.step, checkpoint.extra["accuracy_before"])


def beside_the_state(experiment: Experiment, begun: Begun, costs: CostTable | None) -> dict[str, Any]:
    """What a save holds beside the state and the pipeline for `resume`."""
    return {
        "accuracy_before": begun.accuracy,
        "draft_vocabulary": experiment.draft_vocabulary,
        "problems": experiment.checksum,
        "cost_cells": [] if costs is None else costs.cells,
    }


def warmup_length(experiment: Experiment) -> int:
    """Tokens of a problem with its solution, at most."""
    return experiment.config.data.max_prompt_tokens + experiment.config.rollout.max_new_tokens

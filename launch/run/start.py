"""Start a run from the recipe's networks or from its newest checkpoint."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from configs.schema import RunConfig
from launch.build.experiment import Experiment
from launch.build.memory import check_rollout, check_training
from launch.build.state import abstract_state, fresh_state
from launch.cli.console import console
from launch.cli.errors import ConfigError, refusing
from launch.cli.unfinished import Unfinished
from launch.comparison.best_plans import check_plans
from launch.costs.cost_table import CostTable, load_cells
from launch.data.batches import PromptPipeline, fixed_batches, prompts_per_batch
from launch.distillation.trainer import check_distillation, distill
from launch.evaluation.sampler import Evaluate, make_evaluate
from launch.run.event_log import EventLog
from launch.run.supervised_warmup import check_warmup, warm_up
from launch.run.wandb import check_wandb
from specjax.checkpoint import Checkpointer
from specjax.cost import Cell
from specjax.parallel import processes
from specjax.rewards import RewardFn
from specjax.train.carry_over import check_carry_over
from specjax.train.config import check_mixture
from specjax.train.loss import LossInputs, per_token_loss
from specjax.types import Params, TrainState


class Start(NamedTuple):
    """Starting point of a run.

    step:            the last finished step; 0 for a new run.
    accuracy_before: held-out accuracy before RL, 0 .. 1; None if not evaluated.
    """

    state: TrainState
    step: int
    accuracy_before: float | None


def check_run(experiment: Experiment, continuing: bool) -> list[Cell]:
    """Raise ConfigError if options conflict, before anything is written. Return the cells of `cost_table`, if given.

    continuing: the run continues from a checkpoint, which has its own cells.
    """
    config = experiment.config
    if config.cost_table is not None and not config.rollout.draft_lengths:
        raise ConfigError(f"cost_table = {config.cost_table}: must be none without rollout.draft_lengths")
    check_wandb(config.log.wandb_project)
    with refusing():
        check_mixture(config, experiment.networks.policy)
        check_carry_over(config.rollout, experiment.networks.drafter)
    carry_over, lag = config.rollout.carry_over, config.asynchronous.lag
    if carry_over is not None and lag is not None and processes.count() > 1:
        raise ConfigError(f"rollout.carry_over = {carry_over}: must be None with asynchronous.lag in several processes")
    check_training(experiment)
    if not continuing:
        check_warmup(experiment)
    if config.distill.steps and not continuing:
        check_distillation(experiment)
    _check_best(config)
    if any(value is not None for value in (config.rollout.function, lag, carry_over)):
        rollout = experiment.trace_rollout(config.rollout, config.data.prompts, experiment.rollout_mesh, training=True)
        given = {"model.rollout_dtype": config.model.rollout_dtype, "asynchronous.lag": config.asynchronous.lag}
        for name, value in given.items():
            if value and rollout.full is None:
                raise ConfigError(
                    f"{name} = {value}: must be None, or rollout.function = {config.rollout.function} must return "
                    "`full`, by which the loss corrects for it"
                )
    if config.loss.function is not None:
        _check_loss(experiment)
    check_plans(experiment)
    if config.cost_table is None or continuing:
        return []
    rounds = experiment.phases, config.rollout.draft_lengths
    return load_cells(Path(config.cost_table), *rounds, experiment.networks.policy.mixture)


def _check_best(config: RunConfig) -> None:
    best, saved, measured = config.checkpoint.best, config.checkpoint.every, config.eval.every
    if best == "eval/accuracy" and (not measured or saved % measured):
        raise ConfigError(
            f"checkpoint.every = {saved}: must be a multiple of eval.every = {measured}, which must not be 0, for "
            f"checkpoint.best = {best}"
        )


def _check_loss(experiment: Experiment) -> None:
    """Trace the loss for one row. Raise ConfigError if it refuses its input or does not return one value per token."""
    config, loss = experiment.config, experiment.config.loss
    width = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    shaped: Any = jax.ShapeDtypeStruct
    x, mask = (shaped((1, width), dtype) for dtype in (jnp.float32, jnp.bool))
    inputs = LossInputs(x, x, x, x if loss.kl_coefficient else None, x, mask)
    try:
        jax.eval_shape(lambda inputs: per_token_loss(experiment.loss_fn, inputs, loss), inputs)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"loss.function = {config.loss.function}: {error}") from error


def start_new(experiment: Experiment, evaluate: Evaluate, costs: CostTable | None, unfinished: Unfinished) -> Start:
    """Start a new run: warm up the policy and distil the draft as the recipe says. Raises Stopped at a signal."""
    config = experiment.config

    def before_rl() -> Params:
        params = warm_up(experiment, unfinished)
        return replace(params, draft=distill(experiment, params, unfinished).draft) if config.distill.steps else params

    params = processes.within(experiment.mesh, before_rl, elsewhere=experiment.networks.params)
    state = fresh_state(experiment, params, None if costs is None else costs.update(params, 0, unfinished))
    return Start(state, 0, evaluate(state.params) if config.eval.every else None)


def resume_from(
    experiment: Experiment, saves: Checkpointer, pipeline: PromptPipeline, costs: CostTable | None
) -> Start:
    """Continue from the newest checkpoint; restore `pipeline` and `costs`. Frees the networks of `experiment`.

    Raises ConfigError if the checkpoint does not fit the run.
    """
    abstract = abstract_state(experiment)
    # Otherwise the recipe's networks would occupy memory for the whole run.
    for x in jax.tree.leaves(experiment.networks.params):
        x.delete()
    try:
        checkpoint = saves.restore(abstract)
    except ValueError as error:
        raise ConfigError(f"resume: {error}") from error
    # Old checkpoints have no checksum.
    if checkpoint.extra.get("problems", experiment.checksum) != experiment.checksum:
        raise ConfigError("resume: the problems to train on are not those of the run: data or tokenizer have changed")
    pipeline.set_state(checkpoint.data)
    console.print(f"resumed after step {checkpoint.step}")
    if costs is not None:
        costs.resume([Cell(*cell) for cell in checkpoint.extra["cost_cells"]], checkpoint.step)
    return Start(checkpoint.state, checkpoint.step, checkpoint.extra["accuracy_before"])


def checkpoint_extra(experiment: Experiment, start: Start, costs: CostTable | None) -> dict[str, Any]:
    """Return what a checkpoint stores for `resume_from` besides the state and the pipeline, as JSON."""
    return {
        "accuracy_before": start.accuracy_before,
        "draft_vocabulary": experiment.draft_vocabulary,
        "problems": experiment.checksum,
        "cost_cells": [] if costs is None else costs.cells,
    }


def held_out_evaluator(experiment: Experiment, reward_fn: RewardFn) -> Evaluate:
    """Return params -> accuracy on the held-out prompts, in batches of about as many sequences as a step has."""
    config, table = experiment.config.eval, experiment.held_out_prompts
    count = min(config.prompts, len(table.rows))
    size = prompts_per_batch(experiment.sequences, config.samples, count, experiment.mesh)
    if config.every:
        rollout = replace(experiment.config.rollout, group_size=config.samples, draft_lengths=())
        check_rollout(experiment, rollout, size, {"eval.samples": config.samples})
    evaluate = make_evaluate(experiment, reward_fn, fixed_batches(table.first(count), size))
    return lambda params: processes.within(experiment.mesh, lambda: evaluate(params))


def warn_of_start(experiment: Experiment, events: EventLog, continuing: bool, found: bool) -> None:
    """Warn if prompts are dropped, or if there is no checkpoint to resume from. Print how a read draft differs."""
    if (differences := experiment.networks.draft.differences()) is not None:
        console.print(differences)
    if continuing:
        return
    if experiment.config.resume and not found:
        events.warn(0, "No checkpoint found; starting from scratch")
    for which, table in (("training", experiment.train_prompts), ("held-out", experiment.held_out_prompts)):
        if table.dropped:
            events.warn(0, f"{table.dropped} {which} prompts are empty or over {table.max_length} tokens: dropped")

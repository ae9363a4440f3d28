"""Checks of a run before anything is written, each of which refuses one conflict between options."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from launch.cli.functions import refusing_errors
from launch.comparison.closing import check_comparison
from launch.costs.cost_table import given_cells
from launch.distillation.trainer import check_distillation
from launch.errors import ConfigError, as_config_error, check_all
from launch.evaluation.sampler import held_out_batch_size
from launch.predict.refusals import check_rollout, check_training
from launch.run.metric_log import check_wandb
from launch.run.supervised_warmup import check_warmup
from launch.setup.experiment import Experiment
from launch.setup.rollout_trace import trace_rollout
from specjax.parallel import processes
from specjax.train.config import check_carry_over, check_mixture
from specjax.train.loss import LossInputs, per_token_loss


def check_run(experiment: Experiment, continuing: bool) -> None:
    """Raise one ConfigError for all conflicts between the options of a run.

    continuing: the run continues from a checkpoint, so it has no warm-up and no distillation, and its own cost table.
    """
    of_new_runs = () if continuing else (_check_cost_table, check_warmup, _check_distillation)
    checks = (
        _check_logging,
        _check_best,
        _check_mixture,
        _check_carry_over,
        check_training,
        Experiment.train_batches,
        *of_new_runs,
        _check_rollouts,
        _check_loss_function,
        _check_hints,
        _check_evaluation,
    )
    check_all([partial(check, experiment) for check in checks])


def _check_cost_table(experiment: Experiment) -> None:
    config = experiment.config
    if config.cost_table is not None and not config.rollout.draft_lengths:
        raise ConfigError(f"cost_table = {config.cost_table}: must be none without rollout.draft_lengths")
    given_cells(experiment)


def _check_logging(experiment: Experiment) -> None:
    check_wandb(experiment.config.log.wandb_project)


def _check_best(experiment: Experiment) -> None:
    config = experiment.config
    best, saved, measured = config.checkpoint.best, config.checkpoint.every, config.eval.every
    if best == "eval/accuracy" and (not measured or saved % measured):
        raise ConfigError(
            f"checkpoint.every = {saved}: must be a multiple of eval.every = {measured}, which must not be 0, for "
            f"checkpoint.best = {best}"
        )


def _check_mixture(experiment: Experiment) -> None:
    with as_config_error():
        check_mixture(experiment.config, experiment.networks.policy)


def _check_carry_over(experiment: Experiment) -> None:
    config = experiment.config
    carry_over, lag = config.rollout.carry_over, config.asynchronous.lag
    with as_config_error():
        check_carry_over(config.rollout, experiment.networks.drafter)
    if carry_over is not None and lag is not None and processes.count() > 1:
        raise ConfigError(f"rollout.carry_over = {carry_over}: must be None with asynchronous.lag in several processes")


def _check_distillation(experiment: Experiment) -> None:
    if experiment.config.distill.steps:
        check_distillation(experiment)


def _check_rollouts(experiment: Experiment) -> None:
    """Trace the rollouts of a training step and of the closing comparison, unless they are our own."""
    _check_training_rollout(experiment)
    check_comparison(experiment)


def _check_training_rollout(experiment: Experiment) -> None:
    config, asynchronous = experiment.config, experiment.config.asynchronous
    if config.rollout.function is None and asynchronous.lag is None and config.rollout.carry_over is None:
        return
    options = experiment.step_config.rollout
    rollout = trace_rollout(experiment, options, config.data.prompts, experiment.rollout_mesh, training=True)
    for name, value, allowed in (
        ("model.rollout_dtype", config.model.rollout_dtype, None),
        ("lora.merged", config.lora.merged, False),
        ("asynchronous.lag", asynchronous.lag, None),
    ):
        if value and rollout.full is None:
            raise ConfigError(
                f"{name} = {value}: must be {allowed}, or rollout.function = "
                f"{config.rollout.function} must return `full`, by which the loss corrects for it"
            )


def _check_loss_function(experiment: Experiment) -> None:
    """Trace the loss of one's own for one row: it must accept its input and return one value per token."""
    config, loss = experiment.config, experiment.config.loss
    if loss.function is None:
        return
    width = experiment.prompt_width + config.rollout.max_new_tokens
    shaped: Any = jax.ShapeDtypeStruct
    x, mask = (shaped((1, width), dtype) for dtype in (jnp.float32, jnp.bool))
    inputs = LossInputs(x, x, x, x if loss.kl_coefficient else None, x, mask)
    with refusing_errors("loss.function", loss.function, "take (LossInputs, LossConfig), and return a value per token"):
        jax.eval_shape(lambda inputs: per_token_loss(experiment.loss_fn, inputs, loss), inputs)


def _check_hints(experiment: Experiment) -> None:
    """Raise ConfigError if rows with hints are longer than the teacher can read."""
    teacher, config = experiment.teacher, experiment.config
    if teacher is None or teacher.hints is None:
        return
    decoder = teacher.decoder or experiment.networks.decoder
    hint = experiment.train_prompts.hint_width or config.rollout.max_new_tokens
    longest = experiment.prompt_width + config.rollout.max_new_tokens + teacher.hints.most(hint)
    if decoder is not None and decoder.max_positions < longest:
        raise ConfigError(
            f"teacher.hint = {config.teacher.hint}: rows of the teacher have up to {longest} tokens; must be at most "
            f"{decoder.max_positions}, its number of positions"
        )


def _check_evaluation(experiment: Experiment) -> None:
    options = experiment.config.eval
    if options.every:
        rollout = replace(experiment.config.rollout, group_size=options.samples, draft_lengths=())
        prompts = held_out_batch_size(experiment), experiment.held_out_prompts.width
        check_rollout(experiment, rollout, prompts, {"eval.samples": options.samples})

"""How a run begins: with a policy that warms up and a draft that is distilled, or where its last save left it."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console

from launch.costs import CostTable
from launch.distillation import distill
from launch.errors import ConfigError
from launch.evaluation import Evaluate
from launch.pipeline import PromptPipeline
from launch.setup import Setup
from launch.warmup import warm_up
from specjax.checkpoint import Checkpointer
from specjax.cost import Cell
from specjax.train_step import init_train_state
from specjax.types import Params, TrainState


class Begun(NamedTuple):
    """step: the last one that is done. accuracy: on held-out prompts before RL, a share; None where not evaluated."""

    state: TrainState
    step: int
    accuracy: float | None


def begin(setup: Setup, evaluate: Evaluate, costs: CostTable | None, console: Console) -> Begun:
    """A new run, before its first step."""
    config, params = setup.config, warmed_up(setup, console)
    if config.distill.steps:
        params = replace(params, draft=distill(setup, params, console.print).draft)
    state = fresh_state(setup, params, None if costs is None else costs.update(params, 0))
    return Begun(state, 0, evaluate(state.params) if config.eval.every else None)


def warmed_up(setup: Setup, console: Console) -> Params:
    """The networks as the recipe starts them, behind its supervised steps where it has any."""
    config, params = setup.config, setup.networks.params
    if not config.warmup.steps:
        return params
    policy = warm_up(
        setup.networks.policy,
        params.policy,
        setup.problems.train,
        setup.tokenizer,
        warmup_length(setup),
        config.warmup,
        config.seed,
        setup.mesh,
        report=lambda step, loss: console.print(f"warm-up step {step}: loss {loss:.3f}"),
        logit_chunk=config.logit_chunk,
    )
    return replace(params, policy=policy)


def resume(
    setup: Setup, saves: Checkpointer, pipeline: PromptPipeline, costs: CostTable | None, console: Console
) -> Begun:
    """The run of the newest save, its `pipeline` and `costs` put back too. Raises ConfigError where it does not fit."""
    config = setup.config
    lengths = config.rollout.draft_lengths
    seconds = np.ones((len(setup.phases), len(lengths)), np.float32) if lengths else None
    fresh = fresh_state(setup, setup.networks.params, seconds)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), fresh)
    try:
        checkpoint = saves.restore(abstract)
    except ValueError as error:
        raise ConfigError(f"resume: {error}") from error
    if checkpoint.extra["draft_vocabulary"] != setup.draft_vocabulary:
        raise ConfigError("resume: the problems have changed, and with them the draft's vocabulary")
    pipeline.set_state(checkpoint.data)
    console.print(f"resumed after step {checkpoint.step}")
    if costs is not None:
        costs.resume([Cell(*cell) for cell in checkpoint.extra["cost_cells"]], checkpoint.step)
    return Begun(checkpoint.state, checkpoint.step, checkpoint.extra["accuracy_before"])


def beside_the_state(setup: Setup, begun: Begun, costs: CostTable | None) -> dict[str, Any]:
    """What a save holds beside the state and the pipeline for `resume`."""
    return {
        "accuracy_before": begun.accuracy,
        "draft_vocabulary": setup.draft_vocabulary,
        "cost_cells": [] if costs is None else costs.cells,
    }


def warmup_length(setup: Setup) -> int:
    """Tokens of a problem with its solution, at most."""
    return setup.config.data.max_prompt_tokens + setup.config.rollout.max_new_tokens


def fresh_state(setup: Setup, params: Params, seconds: np.ndarray | None) -> TrainState:
    """The state of a run before its first step. seconds: of a round, where draft lengths are chosen."""
    config = setup.config
    prompts = config.data.prompts, config.data.max_prompt_tokens
    return init_train_state(params, setup.train, setup.mesh, config.loss.kl_coefficient > 0, seconds, prompts)

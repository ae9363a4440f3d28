"""Start a run from the recipe's networks or from its newest checkpoint."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax

from configs.schema import RunConfig
from launch.console import console
from launch.costs.cost_table import CostTable
from launch.data.batches import PromptPipeline, fixed_batches
from launch.distillation.trainer import answer_generator, distill, first_drafter
from launch.environments.build import is_deterministic
from launch.errors import ConfigError
from launch.evaluation.sampler import Evaluate, held_out_batch_size
from launch.run.logs import RunLogs
from launch.run.networks import check_base
from launch.run.summary import measures_costs_later, summarize
from launch.run.supervised_warmup import warm_up
from launch.run.teacher_check import check_teacher
from launch.setup.experiment import Experiment
from launch.setup.state import abstract_state, fresh_state
from launch.setup.teacher import check_same_teacher
from specjax.asynchronous.step import AsynchronousStep
from specjax.checkpoint import Checkpointer
from specjax.cost import Cell
from specjax.parallel import processes
from specjax.rewards import RewardFn
from specjax.train.timed_step import ProbeStep
from specjax.train.train_step import TrainStep
from specjax.types import Params, TrainState

Step = TrainStep | AsynchronousStep


class Steps(NamedTuple):
    """The compiled step of a run, in its forms: called alike, with the same states, tokens and gradients.

    whole: with all draft lengths.
    plain: at draft length 0, as long as no other is chosen: compiled sooner. None if the whole step is needed at once.
    probe: timed stage by stage. None for an asynchronous run.
    """

    whole: Step
    plain: TrainStep | None
    probe: ProbeStep | None

    def fused(self, drafts: bool) -> Step:
        """Return the form to take: the whole step if it may draft, else the plain one if there is one."""
        return self.whole if drafts or self.plain is None else self.plain


class Start(NamedTuple):
    """Starting point of a run.

    step:             the last finished step; 0 for a new run.
    accuracy_before:  held-out accuracy before RL, 0 .. 1; None if not evaluated.
    truncated_before: share of those completions that the budget ended; None if not evaluated by this process.
    """

    state: TrainState
    step: int
    accuracy_before: float | None
    truncated_before: float | None = None


def make_steps(experiment: Experiment, reward_fn: RewardFn) -> Steps:
    """Return the steps of a run. Nothing is compiled yet."""
    config, stages = experiment.step_config, experiment.stages(reward_fn)
    if config.asynchronous.lag is not None:
        return Steps(AsynchronousStep(stages, experiment.rollout_mesh), None, None)
    several = len(config.rollout.lengths) > 1 and config.rollout.lengths[0] == 0
    plain = TrainStep(replace(stages, undrafted=True)) if several else None
    return Steps(TrainStep(stages), plain, ProbeStep(stages))


def start_new(experiment: Experiment, evaluate: Evaluate, steps: Steps, costs: CostTable | None) -> Start:
    """Start a new run: warm up the policy and distil the draft as the recipe says. Raises Stopped at a signal.

    Meanwhile the programs of later phases compile, in the order in which they are needed.
    """
    config = experiment.config
    later = costs is not None and measures_costs_later(experiment) and not costs.has_cells(0)

    def before_rl() -> Params:
        networks = experiment.networks
        generator = answer_generator(experiment) if config.distill.steps else None
        if generator is not None:
            generator.start_compiling(networks.params, first_drafter(experiment))
        if config.eval.every and (later or not config.rollout.draft_lengths):
            evaluate.start_compiling(networks.params, drafts=not later)
        compile_step(experiment, steps.fused(drafts=not later))
        check_teacher(experiment)
        params = warm_up(experiment)
        if generator is None:
            return params
        return replace(params, draft=distill(experiment, params, generator=generator).draft)

    params = processes.within(experiment.mesh, before_rl, elsewhere=experiment.networks.params)
    state = fresh_state(experiment, params, None if costs is None else costs.start(params, later))
    return Start(state, 0, *(evaluate(state) if config.eval.every else (None, None)))


def compile_step(experiment: Experiment, train_step: Step) -> None:
    """Start to compile the step for the state of a run (`TrainStep.start_compiling`)."""
    train_step.start_compiling(abstract_state(experiment), experiment.abstract_prompts(experiment.config.data.prompts))


def resume_from(
    experiment: Experiment, saves: Checkpointer, pipeline: PromptPipeline, steps: Steps, costs: CostTable | None
) -> Start:
    """Continue from the newest checkpoint; restore `pipeline` and `costs`. Frees the networks of `experiment`.

    A checkpoint holds neither a teacher nor the base of adapters: those of `experiment` go on.

    Raises ConfigError if the checkpoint does not fit the run.
    """
    abstract, params = abstract_state(experiment), experiment.networks.params
    # Otherwise the recipe's networks would occupy memory for the whole run.
    for x in jax.tree.leaves(replace(params, base=())):
        x.delete()
    try:
        checkpoint = saves.restore(abstract)
    except ValueError as error:
        raise ConfigError(f"resume: {error}") from error
    check_base("resume", experiment, checkpoint.extra)
    check_same_teacher(experiment.teacher, checkpoint.extra)
    # Old checkpoints have no checksum.
    if checkpoint.extra.get("problems", experiment.checksum) != experiment.checksum:
        raise ConfigError(
            "resume: the problems to train on are not those of the run: data, tokenizer, chat template or the time "
            f"that it shows have changed (data.chat_template_time = {experiment.config.data.chat_template_time})"
        )
    pipeline.set_state(checkpoint.data)
    console.print(f"resumed after step {checkpoint.step}")
    if costs is not None and checkpoint.state.drafting is not None:
        cells, drafting = [Cell(*cell) for cell in checkpoint.extra["cost_cells"]], checkpoint.state.drafting
        costs.resume(cells, checkpoint.step, drafting)
    teacher = None if experiment.teacher is None else experiment.teacher.params
    params = replace(checkpoint.state.params, base=params.base)
    state = replace(checkpoint.state, params=params, teacher=teacher)
    compile_step(experiment, steps.fused(drafts=costs is None or costs.used))
    return Start(state, checkpoint.step, checkpoint.extra["accuracy_before"])


def checkpoint_extra(experiment: Experiment, start: Start, costs: CostTable | None) -> dict[str, Any]:
    """Return what a checkpoint stores for `resume_from` besides the state and the pipeline, as JSON."""
    return {
        "accuracy_before": start.accuracy_before,
        "draft_vocabulary": experiment.draft_vocabulary,
        "base": experiment.networks.base_hash,
        "teacher": None if experiment.teacher is None else experiment.teacher.hash,
        "problems": experiment.checksum,
        "cost_cells": [] if costs is None else costs.cells,
    }


def held_out_evaluator(experiment: Experiment, reward_fn: RewardFn) -> Evaluate:
    """Return state -> Evaluation on the held-out prompts, in batches of about as many sequences as a step has."""
    table, size = experiment.held_out_prompts, held_out_batch_size(experiment)
    return Evaluate(experiment, reward_fn, fixed_batches(table.first(experiment.config.eval.prompts), size))


def not_repeatable(config: RunConfig) -> str | None:
    """Return why the steps of a run depend on more than its seeds; None if they do not. config: `step_config`."""
    rollout, names = config.rollout, ", ".join(config.environment.names)
    if not is_deterministic(rollout.environment):
        return f"{names}: deterministic = False"
    reads_siblings = config.draft.lookup.kind == "history" and max(rollout.lengths) > 0
    if rollout.answers_on_host and reads_siblings and rollout.verifier != "coupled":
        return f"draft.lookup.kind = history: reads other rows, whose progress depends on the delays of {names}"
    return None


def report_start(experiment: Experiment, logs: RunLogs, start: Start, continuing: bool, found: bool) -> None:
    """Log what the run is and its first evaluation.

    Warn of dropped prompts, of a missing checkpoint, and of an environment that a resumed run cannot repeat.
    """
    events = logs.events
    events.record_summary(start.step, summarize(experiment, continuing))
    if (differences := experiment.networks.draft.differences()) is not None:
        console.print(differences)
    if continuing:
        if (reason := not_repeatable(experiment.step_config)) is not None:
            events.warn(start.step, f"{reason}: steps after {start.step} may differ from those of an unbroken run")
        return
    if start.truncated_before is not None:
        logs.timer.log_start({"eval/accuracy": start.accuracy_before, "eval/truncated": start.truncated_before})
        logs.cut.evaluated(start.step, start.truncated_before)
    if experiment.config.resume and not found:
        events.warn(0, "No checkpoint found; starting from scratch")
    for which, table in (("training", experiment.train_prompts), ("held-out", experiment.held_out_prompts)):
        if table.dropped:
            events.warn(0, f"{table.dropped} {which} prompts are empty or over {table.max_length} tokens: dropped")

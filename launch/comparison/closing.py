"""Closing comparison of a run: steps with and without drafting, as `launch.compare` times them."""

from dataclasses import replace

import jax
from rich.console import Console

from configs.schema import AsynchronousConfig
from launch.comparison.stage_times import VariantReport, time_variants
from launch.comparison.variants import AUTOMATIC, PLAIN, make_variants
from launch.errors import ConfigError
from launch.predict.refusals import check_training
from launch.setup.experiment import Experiment
from launch.setup.rollout_trace import trace_rollout
from specjax.parallel import processes
from specjax.rewards import RewardFn
from specjax.types import Params, TrainState


def check_comparison(experiment: Experiment) -> None:
    """Raise ConfigError if the steps of the run's speedup section cannot be compared."""
    config = experiment.config
    if not config.speedup.steps:
        return
    if not any(config.rollout.lengths):
        raise ConfigError(f"speedup.steps = {config.speedup.steps}: must be 0 without a draft or at draft length 0")
    compared = comparison_experiment(experiment)
    try:
        if config.asynchronous.lag is not None:
            check_training(compared)
        if config.rollout.function is not None:
            trace_rollout(compared, compared.config.rollout, config.data.prompts, compared.mesh)
    except ConfigError as error:
        raise ConfigError(f"speedup.steps = {config.speedup.steps}: {error}") from error


def comparison_experiment(experiment: Experiment) -> Experiment:
    """Return the experiment with synchronous steps that end every sequence, at the draft lengths of the run."""
    rollout = experiment.config.rollout
    rollout = replace(rollout, draft_lengths=rollout.lengths, carry_over=None, max_age=None)
    config = replace(experiment.config, rollout=rollout, asynchronous=AsynchronousConfig())
    return replace(experiment, config=config, rollout_mesh=experiment.mesh)


def without_moments(state: TrainState) -> TrainState:
    """Delete what only updates read: moments, reference and rollouts under way. Return the state without them."""
    for x in jax.tree.leaves((state.optimizer, state.reference, state.ahead)):
        x.delete()
    return replace(state, optimizer=Params({}, {}), reference=None, ahead=())


def compare_steps(experiment: Experiment, reward_fn: RewardFn, state: TrainState, console: Console) -> VariantReport:
    """Time `speedup.steps` steps of each kind from the trained networks, and print the table of `launch.compare`.

    They are the steps that would come next, with new noise. Returns the times with the draft lengths that the run uses.
    Raises Stopped at a signal.

    state: `without_moments`, whose memory the comparison needs.
    """
    # Seconds of rounds on a mesh other than the comparison's say nothing about it.
    drafting = state.drafting if experiment.rollout_mesh is experiment.mesh else None
    seconds = None if drafting is None else processes.fetch(drafting.seconds)
    experiment = comparison_experiment(experiment).with_state(state)
    config = experiment.config
    variants, _ = make_variants(experiment, reward_fn, state.params, seconds, first=config.steps)
    reports = time_variants(variants, config, config.speedup.steps, console, lambda reports: None)
    drafted = [report for name, report in reports.items() if name != PLAIN]
    return reports.get(AUTOMATIC) or max(drafted, key=lambda report: report.step_speedup[0])

"""Closing comparison of a run: steps with and without drafting, as `launch.compare` times them."""

from dataclasses import replace

from rich.console import Console

from launch.build.experiment import Experiment
from launch.cli.errors import ConfigError
from launch.cli.unfinished import Unfinished
from launch.comparison.asynchronous import synchronous
from launch.comparison.stage_times import VariantReport, time_variants
from launch.comparison.variants import AUTOMATIC, PLAIN, make_variants
from specjax.parallel import processes
from specjax.rewards import RewardFn
from specjax.types import TrainState


def check_comparison(experiment: Experiment) -> None:
    """Raise ConfigError if the steps of the run's speedup section cannot be compared."""
    config = experiment.config
    if not config.speedup.steps:
        return
    if not any(config.rollout.lengths):
        raise ConfigError(f"speedup.steps = {config.speedup.steps}: must be 0 without a draft or at draft length 0")
    compared = _compared(experiment)
    if config.rollout.function is not None:
        try:
            compared.trace_rollout(compared.config.rollout, config.data.prompts, compared.mesh)
        except ConfigError as error:
            raise ConfigError(f"speedup.steps = {config.speedup.steps}: {error}") from error


def compare_steps(
    experiment: Experiment, reward_fn: RewardFn, state: TrainState, console: Console, unfinished: Unfinished
) -> VariantReport:
    """Time `speedup.steps` steps of each kind from the trained networks, and print the table of `launch.compare`.

    Return the times with the draft lengths that the run uses. Raises Stopped at a signal.
    """
    experiment = _compared(experiment)
    experiment = replace(experiment, networks=replace(experiment.networks, params=state.params))
    config, shape = experiment.config, (len(experiment.phases), len(experiment.config.rollout.lengths))
    chosen_by = None if state.drafting is None else processes.fetch(state.drafting.seconds)
    seconds = chosen_by if chosen_by is not None and chosen_by.shape == shape else None
    variants, _ = make_variants(experiment, reward_fn, state.params, seconds, unfinished)
    reports = time_variants(variants, config, config.speedup.steps, unfinished, console, lambda reports: None)
    drafted = [report for name, report in reports.items() if name != PLAIN]
    return reports.get(AUTOMATIC) or max(drafted, key=lambda report: report.step_speedup[0])


def _compared(experiment: Experiment) -> Experiment:
    """Return the experiment with synchronous steps that end every sequence, at the run's draft lengths and at 0."""
    experiment = synchronous(experiment)
    rollout = experiment.config.rollout
    lengths = tuple(sorted({0, *rollout.lengths}))
    rollout = replace(rollout, draft_lengths=lengths, carry_over=None, max_age=None)
    return replace(experiment, config=replace(experiment.config, rollout=rollout))

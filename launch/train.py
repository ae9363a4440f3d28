"""Train a policy and its draft: `python -m launch.train CONFIG [--section.field VALUE ...]`."""

from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

from configs.override import override
from configs.schema import RunConfig
from launch.cli.options import parse_run
from launch.cli.program import run_program, use_compile_cache
from launch.console import console
from launch.costs.cost_table import COST_TABLE, CostTable, given_cells
from launch.environments.build import Local
from launch.errors import RunStopped
from launch.jobs.hosts import join_hosts
from launch.phases.long_phases import UNFINISHED, LongPhases
from launch.phases.run_clock import run_part, timed_run
from launch.phases.signals import StopSignals
from launch.plan.__main__ import main as plan
from launch.report import try_report
from launch.rewards.code import code_of_modules
from launch.rewards.reward_fn import RewardOf, make_pool, scoring_of
from launch.rewards.thinking import describe_thinking
from launch.run.checks import check_run
from launch.run.directory import CHECKPOINTS, can_resume, check_resumable, open_run, record_config
from launch.run.first_problem import describe_first_problem
from launch.run.logs import open_logs
from launch.run.loop import TrainingLoop
from launch.run.metric_log import wandb_log
from launch.run.pin_references import with_commits
from launch.run.results import record_results
from launch.run.start import held_out_evaluator, make_steps, report_start, resume_from, start_new
from launch.run.step_checks import describe_healthy
from launch.run.summary import summarize
from launch.setup.experiment import Experiment, build_experiment
from specjax.checkpoint import Checkpointer
from specjax.program import dropping_compilations
from specjax.rewards import RewardFn
from specjax.short_repr import short_repr
from specjax.types import TrainState


def main(argv: list[str]) -> int:
    """Start or continue the run that the command line describes, and return the exit code.

    It is 143 after SIGTERM and 130 after Ctrl-C.
    """
    if "--plan" in argv:
        return plan([word for word in argv if word != "--plan"])
    use_compile_cache()
    about = "Train a policy and its draft. With --plan, compile a step for absent GPUs instead, as launch.plan does."
    config = join_hosts(parse_run(argv, "python -m launch.train", about))
    signal = run(config).signal
    return 0 if signal is None else 128 + signal


class RunResult(NamedTuple):
    """A run that has ended, with the trained networks, and the signal that stopped it, if one did."""

    directory: Path
    experiment: Experiment
    state: TrainState
    signal: int | None

    __repr__ = short_repr


def run(config: RunConfig, reward_of: RewardOf | None = None, local: Local | None = None) -> RunResult:
    """Start or continue a run.

    reward_of: returns the reward of completions of problems; None: `config.reward`.
    local:     the environment of this process; None: `config.environment`.

    Raises RunStopped if too many steps in a row skipped an update.
    """
    with (
        StopSignals(console.print) as signals,
        open_run(config) as directory,
        dropping_compilations(),
        timed_run(),
        LongPhases(directory / UNFINISHED, signals) as long_phases,
    ):
        config = with_commits(config, directory if config.resume else None, starts=True)
        # `launch.trainer` has hashed its caller's functions. On the command line the recorded hash is an earlier one.
        own = None if reward_of is None and local is None else config.reward.code
        codes = own, code_of_modules([*config.reward.names, *config.environment.names])
        config = override(config, {"reward.code": "+".join(filter(None, codes)) or None})
        check_resumable(directory, config)
        experiment = build_experiment(config, takes_steps=True, local=local)
        with (make_pool(experiment.config) if reward_of is None else None) or nullcontext() as pool:
            reward_of = reward_of or scoring_of(experiment.config.reward, pool)
            rewards = [reward_of(problems, experiment.tokenizer) for problems in experiment.problems]
            state, signal = train(experiment, rewards[0], rewards[1], directory, signals, long_phases)
            return RunResult(directory, experiment.with_state(state), state, signal)


def train(
    experiment: Experiment,
    reward_fn: RewardFn,
    held_out_reward_fn: RewardFn,
    directory: Path,
    signals: StopSignals,
    long_phases: LongPhases,
) -> tuple[TrainState, int | None]:
    """Start or resume the run, take its steps and write the report. Return the last state, and a signal that ended it.

    long_phases: what is kept of the phases before the first step; called within its `with` block.

    Raises RunStopped if too many steps in a row skipped an update.
    """
    config, continuing = experiment.config, can_resume(experiment.config, directory)
    check_run(experiment, continuing)
    evaluate = held_out_evaluator(experiment, held_out_reward_fn)
    pipeline, costs = experiment.train_batches(), None
    if config.rollout.draft_lengths:
        cells = [] if continuing else given_cells(experiment)
        costs = CostTable(experiment, directory / COST_TABLE, cells, replayed=config.cost_table is not None)
    record_config(directory, config, report=console.print)
    if config.resume and not continuing:
        kept = "goes on with what is kept of its" if long_phases.found else "begins again, with"
        console.print(f"{directory} has no checkpoint: {kept} warm-up and distillation")
    console.print("\n".join(summarize(experiment, continuing)))
    if not continuing:
        console.print("\n".join(describe_first_problem(experiment, reward_fn)))
    if (thinking := describe_thinking(config, experiment.tokenizer, experiment.problems.train)) is not None:
        console.print(thinking)
    checkpoints, (keep, best) = directory / CHECKPOINTS, (config.checkpoint.keep, config.checkpoint.best)
    with wandb_log(config, directory) as wandb, Checkpointer(checkpoints, keep, best, experiment.mesh) as saves:
        steps = make_steps(experiment, reward_fn)
        with run_part("loading"):
            resumed = resume_from(experiment, saves, pipeline, steps, costs) if continuing else None
        start = resumed or start_new(experiment, evaluate, steps, costs)
        try:
            with open_logs(experiment, directory, start.step if continuing else None, signals, wandb) as logs:
                report_start(experiment, logs, start, continuing, long_phases.found)
                loop = TrainingLoop(
                    experiment=experiment,
                    start=start,
                    steps=steps,
                    pipeline=pipeline,
                    evaluate=evaluate,
                    costs=costs,
                    saves=saves,
                    logs=logs,
                    long_phases=long_phases,
                )
                # The loop looks for signals itself, between steps.
                with run_part("steps"), LongPhases():
                    state = loop.run()
                if logs.skipped.reason is not None:
                    raise RunStopped(f"{logs.skipped.reason}; {describe_healthy(saves)}")
                stopped = signals.received
                if stopped is None:
                    state = record_results(experiment, reward_fn, start, state, evaluate, logs)
        finally:
            try_report(directory)
    return state, stopped


if __name__ == "__main__":
    raise SystemExit(run_program(main))

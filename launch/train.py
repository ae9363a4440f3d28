"""Train a policy and its draft: `python -m launch.train CONFIG [--section.field VALUE ...]`."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.console import Console

from launch.build.experiment import Experiment, build_experiment
from launch.cli.compilation import CompileClock
from launch.cli.errors import RunStopped
from launch.cli.options import parse_run, run_program, use_compile_cache
from launch.comparison.best_plans import compare_plans, print_speedup
from launch.costs.cost_table import COST_TABLE, CostTable
from launch.data.batches import PromptPipeline, fixed_batches
from launch.evaluation.sampler import Evaluate, make_evaluate, prompts_per_batch
from launch.report import write_report
from launch.rewards.reward_fn import make_pool, make_reward
from launch.run.console import reasons
from launch.run.directory import CHECKPOINTS, open_run, resumes
from launch.run.draft_alerts import Switches, losing, misloaded
from launch.run.event_log import Diary
from launch.run.metric_log import RunLogger
from launch.run.sample_log import SampleLog
from launch.run.signals import Stopping
from launch.run.skipped_updates import SkippedUpdates
from launch.run.start import Begun, begin, beside_the_state, checked, resume
from launch.run.step_timer import StepRecord, Values
from launch.run.wandb import wandb_log
from specjax.checkpoint import Checkpointer
from specjax.rewards import RewardFn
from specjax.train.timed_step import ProbeStep
from specjax.train.train_step import make_train_step
from specjax.types import TrainState

PROFILE = "profile"
# Held-out completions, where a step has fewer: small batches would only make evaluation slow.
EVALUATED_AT_ONCE = 256

console = Console(highlight=False, soft_wrap=True)


def main(argv: list[str]) -> int:
    """Run, or continue, what the command line describes.

    The exit code of a run that was told to stop is that of the signal, 143 or 130: it is not complete. Raises
    RunStopped, when the state is saved, where too many steps in a row skipped an update.
    """
    use_compile_cache()
    config = parse_run(argv, "python -m launch.train", "Train a policy and its draft with GRPO.")
    experiment = build_experiment(config)
    pool = make_pool(config.reward)
    with pool or nullcontext():
        return train(
            experiment,
            make_reward(pool, experiment.problems.train, experiment.tokenizer, experiment.mesh),
            make_reward(pool, experiment.problems.held_out, experiment.tokenizer, experiment.mesh),
        )


def train(experiment: Experiment, reward_fn: RewardFn, held_out_reward: RewardFn) -> int:
    """The run: warm-up and distillation or resume, the steps, the closing comparison. Returns the exit code."""
    config, networks = experiment.config, experiment.networks
    pipeline = PromptPipeline(experiment.train_prompts, config.data.prompts, config.seed)
    evaluate = _evaluator(experiment, held_out_reward)
    parts = networks.policy, networks.drafter, reward_fn, experiment.train, experiment.mesh
    step, probe = make_train_step(*parts), ProbeStep(*parts)
    continuing = resumes(config)
    cells = checked(experiment, continuing)
    directory = open_run(config, report=lambda said: console.print(said, markup=False))
    _say_what_was_read(experiment, directory)
    costs = None
    if config.rollout.draft_lengths:
        costs = CostTable(experiment, directory / COST_TABLE, cells, replayed=config.cost_table is not None)
    with Checkpointer(directory / CHECKPOINTS, config.checkpoint.keep, config.checkpoint.best) as saves:
        if continuing:
            begun = resume(experiment, saves, pipeline, costs, console)
        else:
            begun = begin(experiment, evaluate, costs, console)
        last = begun.step if config.resume else None
        diary = Diary(directory, console, begun.step)
        if config.resume and not continuing:
            diary.warn(0, "nothing had been saved: the run begins anew")
        if not continuing:
            _say_what_is_dropped(experiment, diary)
        samples = SampleLog(directory, experiment, last)
        try:
            with (
                wandb_log(config, directory) as also,
                RunLogger(
                    directory, max(config.rollout.lengths), config.print_every, last, config.reward.parts, also
                ) as logger,
                Stopping(console.print) as stopping,
            ):
                switches = Switches(experiment.phases, config.rollout.draft_lengths, diary.warn)
                skipped = SkippedUpdates(directory, config.max_skipped, begun.step)
                record = StepRecord(logger, switches, _first_step(experiment, begun, diary), skipped)
                kept = costs, saves, record, stopping, skipped, samples, diary
                state = Steps(experiment, begun, step, probe, pipeline, evaluate, *kept).run()
            if skipped.reason is not None:
                raise RunStopped(skipped.reason)
            if stopping.signal is not None:
                return 128 + stopping.signal
            if begun.accuracy is not None:
                after = record.logged.get("eval/accuracy")
                if after is None:
                    after = evaluate(state.params)
                console.print(f"held-out accuracy: {begun.accuracy:.1%} before RL, {after:.1%} after")
                diary.result(config.steps, accuracy_before=begun.accuracy, accuracy_after=after)
            if config.speedup.slots:
                both = compare_plans(experiment, state.params)
                print_speedup(*both, console)
                diary.result(config.steps, speedup=both[0].speedup[0], speedup_of_the_tail=both[1].speedup[0])
        finally:
            _report(directory)
    return 0


@dataclass(frozen=True)
class Steps:
    """The steps of a run that has begun, with what is due after each: log, evaluation, save."""

    experiment: Experiment
    begun: Begun
    step: Callable
    probe: ProbeStep
    pipeline: PromptPipeline
    evaluate: Evaluate
    costs: CostTable | None
    saves: Checkpointer
    record: StepRecord
    stopping: Stopping
    skipped: SkippedUpdates
    samples: SampleLog
    diary: Diary

    def run(self) -> TrainState:
        """The state after the last step, or the one in which the run was told to stop, or found to skip updates."""
        config, clock, state = self.experiment.config, CompileClock(), self.begun.state
        if self.begun.step == 0 and config.checkpoint.every and (config.warmup.steps or config.distill.steps):
            # These may have taken longer than many steps.
            self._save(0, state)
        if 0 < config.profile_step <= self.begun.step:
            console.print(f"profile_step = {config.profile_step}: that step is done, and nothing is traced")
        for number in range(self.begun.step + 1, config.steps + 1):
            take = self._profile if number == config.profile_step else self._take
            state = take(number, state, clock)
            if _due(number, config.eval.every):
                self.record.wait()
                self.record.finish({"eval/accuracy": self.evaluate(state.params)})
            stopped = self.stopping.signal is not None or self.skipped.reason is not None
            if _due(number, config.checkpoint.every) or (
                config.checkpoint.every and (number == config.steps or stopped)
            ):
                # Logged first: a run killed behind the save resumes behind this step's line.
                self.record.finish()
                self._save(number, state)
            if stopped:
                saved = "--resume continues it" if config.checkpoint.every else "nothing is saved: checkpoint.every = 0"
                self.diary.warn(number, f"stopped after step {number}; {saved}")
                if self.skipped.reason is not None:
                    self.diary.keep(number, self.skipped.reason)
                break
        self.record.finish()
        self.saves.wait()
        return state

    def _profile(self, number: int, state: TrainState, clock: CompileClock) -> TrainState:
        with jax.profiler.trace(str(self.diary.directory / PROFILE)):
            return jax.block_until_ready(self._take(number, state, clock))

    def _take(self, number: int, state: TrainState, clock: CompileClock) -> TrainState:
        start = time.perf_counter()
        prompts = next(self.pipeline)
        data_s = time.perf_counter() - start
        probing, ahead = (_due(n, self.experiment.config.probe_every) for n in (number, number + 1))
        # Before every probe, though one would do: a resumed run takes the programs that the whole one did.
        staged = probing or ahead
        if staged:
            self.record.finish()
        state = self._costed(number, state, probing)
        if staged:
            start = time.perf_counter()
        clock.lap()
        # A copy, still there to be told of when the state has been donated.
        by = None if state.drafting is None else jax.tree.map(jnp.copy, state.drafting)
        step = self.probe if probing else self.probe.rehearse if ahead else self.step
        state, rollout, metrics = step(state, prompts)
        if (compiling := clock.lap()) and not staged:
            console.print(f"compiled the step in {compiling:.1f} s")
        if probing:
            self._say_what_it_gains(number, metrics)
        timed = metrics | {"time/data": data_s}
        if staged:
            # A step begins with asking for its prompts.
            timed["time/step"] += data_s
        self.record.dispatched(number, start, timed, by and (rollout.draft_length, by), (prompts, rollout))
        if self.samples.due(number):
            self.record.wait()
            self.samples.write(number, prompts, rollout)
        return state

    def _costed(self, number: int, state: TrainState, probing: bool) -> TrainState:
        """The state with newer costs where they are due, and before a probe the reasons for its draft lengths."""
        if self.costs is not None and self.costs.due(number, probing):
            state = replace(state, drafting=self.costs.refresh(state, number))
        if probing and state.drafting is not None:
            console.print(reasons(self.experiment.phases, self.experiment.config.rollout.draft_lengths, state.drafting))
        return state

    def _say_what_it_gains(self, number: int, metrics: Values) -> None:
        measured = float(metrics["perf/speedup_vs_autoregressive"])
        if self.costs is not None:
            console.print(f"  measured over all phases: {measured:.2f} times the speed of draft length 0")
        elif said := losing(measured, self.experiment.config.rollout.draft_length):
            self.diary.warn(number, said)

    def _save(self, number: int, state: TrainState) -> None:
        extra, best = beside_the_state(self.experiment, self.begun, self.costs), self.experiment.config.checkpoint.best
        score = None if best is None else self.record.logged.get(best)
        self.saves.save(number, state, self.pipeline.get_state(), extra, score)


def _report(directory: Path) -> None:
    """Of the run, however it ended: what cannot be shown must not hide why."""
    try:
        console.print(f"report: {write_report(directory)}")
    except Exception as error:
        console.print(f"no report: {type(error).__name__}: {error}", markup=False)


def _say_what_was_read(experiment: Experiment, directory: Path) -> None:
    console.print(f"run directory: {directory}")
    if (said := experiment.networks.draft.differences()) is not None:
        console.print(said, markup=False)


def _say_what_is_dropped(experiment: Experiment, diary: Diary) -> None:
    for which, table in (("training", experiment.train_prompts), ("held-out", experiment.held_out_prompts)):
        if table.dropped:
            diary.warn(0, f"{table.dropped} {which} prompts are empty or over {table.max_length} tokens: dropped")


def _first_step(experiment: Experiment, begun: Begun, diary: Diary) -> Callable[[Values], None] | None:
    """What holds the first step against what the draft's checkpoint states; behind it, the draft has been trained."""
    draft = experiment.networks.draft
    if draft.read_from is None or begun.step > 0:
        return None
    temperature = experiment.config.rollout.law.temperature

    def check(metrics: Values) -> None:
        predicted = metrics.get("draft/predicted_acceptance")
        if predicted is None:
            return
        said = misloaded(draft, float(predicted), temperature)
        if said is not None:
            diary.warn(1, said, style="bold red")

    return check


def _due(number: int, every: int) -> bool:
    return every > 0 and number % every == 0


def _evaluator(experiment: Experiment, reward_fn: RewardFn) -> Evaluate:
    config, networks, table = experiment.config, experiment.networks, experiment.held_out_prompts
    count, samples = min(config.eval.prompts, len(table.rows)), config.eval.samples
    size = prompts_per_batch(max(experiment.sequences, EVALUATED_AT_ONCE), samples, count, experiment.mesh)
    return make_evaluate(
        networks.policy,
        networks.drafter,
        reward_fn,
        experiment.train.rollout,
        samples,
        fixed_batches(table.first(count), size),
        config.seed,
        experiment.mesh,
    )


if __name__ == "__main__":
    raise SystemExit(run_program(main))

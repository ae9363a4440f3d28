"""The training loop: take a step, then evaluate, save and log."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from launch.console import console
from launch.costs.cost_table import CostTable
from launch.data.batches import PromptPipeline
from launch.errors import RunStopped
from launch.evaluation.sampler import Evaluate
from launch.phases.compile_clock import CompileClock
from launch.phases.long_phases import LongPhases
from launch.phases.progress import showing_elapsed
from launch.phases.run_clock import run_part
from launch.run.draft_monitor import explain_choice
from launch.run.logs import RunLogs
from launch.run.start import Start, Steps, checkpoint_extra, compile_step
from launch.run.step_timer import DispatchedStep
from launch.setup.experiment import Experiment
from specjax.asynchronous.step import AsynchronousStep, MixedVersions
from specjax.carry_over.groups import next_prompts
from specjax.checkpoint import Checkpointer
from specjax.parallel import processes
from specjax.parallel.memory import host_gib, host_peak_gib, peak_gib
from specjax.train.train_step import StepResult
from specjax.types import Prompts, TrainState

PROFILE = "profile"


@dataclass(frozen=True)
class TrainingLoop:
    """The remaining steps of a run, each with its evaluation, checkpoint and logs.

    costs:       the costs by which draft lengths are chosen; None at a fixed draft length.
    long_phases: warm-up and distillation, which are kept until there is a checkpoint.
    """

    experiment: Experiment
    start: Start
    steps: Steps
    pipeline: PromptPipeline
    evaluate: Evaluate
    costs: CostTable | None
    saves: Checkpointer
    logs: RunLogs
    long_phases: LongPhases
    clock: CompileClock = field(default_factory=CompileClock)
    # Forms of the step that have been called.
    begun: set[Callable[..., StepResult]] = field(default_factory=set)

    def run(self) -> TrainState:
        """Return the state after the last step, or after the one in which the run had to stop."""
        config, state = self.experiment.config, self.begin_ahead(self.start.state)
        if self.start.step == 0 and config.checkpoint.every and (config.warmup.steps or config.distill.steps):
            # Warm-up and distillation may have taken longer than many steps.
            self.save(0, state)
        if 0 < config.profile_step <= self.start.step:
            console.print(f"profile_step = {config.profile_step}: that step is already done; no trace is written")
        if self.start.step < config.steps:
            console.print("compiling the step ..")
        for number in range(self.start.step + 1, config.steps + 1):
            if number == self.start.step + 1 and self.logs.signals.received is not None:
                self.warn_of_stop(self.start.step)
                break
            take = self.profile_step if number == config.profile_step else self.take_step
            state = take(number, state)
            if number == 1:
                # The checkpoint of step 0 was written meanwhile: what was kept of the warm-up can go.
                self.record_newest()
            self.evaluate_if_due(number, state)
            # Read once per step: a signal that arrives after the save stops the run after the next step.
            stopping = self.logs.must_stop
            last = stopping or number == config.steps
            self.logs.write_samples(last)
            self.save_if_due(number, state, last)
            if stopping:
                self.warn_of_stop(number)
                break
        self.logs.timer.finish()
        self.record_newest()
        if self.logs.signals.received is None:
            self.long_phases.remove()
        return state

    def begin_ahead(self, state: TrainState) -> TrainState:
        """Return the state with the rollouts that an asynchronous run trains on first. A resumed run has them."""
        step = self.steps.whole
        if isinstance(step, AsynchronousStep):
            while len(state.ahead) < (self.experiment.config.asynchronous.lag or 0):
                state = step.begin(state, self.next_prompts(state))
        return state

    def next_prompts(self, state: TrainState) -> Prompts:
        """Return the prompts of the next rollout. With carry-over this waits for the one before it."""
        if state.carried is None:
            return next(self.pipeline)
        return next_prompts(state.carried, self.pipeline.take)

    def take_step(self, number: int, state: TrainState) -> TrainState:
        """Take one step on the next prompts, and hand it to the logs."""
        if state.carried is not None and not isinstance(self.steps.whole, AsynchronousStep):
            # What goes on is a result of the whole step before.
            self.logs.timer.wait()
        start = time.perf_counter()
        prompts = self.next_prompts(state)
        trained = state.ahead[0].prompts if state.ahead else prompts
        data_s = time.perf_counter() - start
        timed = self.is_probe(number) or self.is_probe(number + 1)
        if timed:
            self.logs.timer.finish()
        state = self.update_costs(number, state)
        step = self.choose_step(number)
        # Without the measurement of costs.
        start = time.perf_counter() - (0.0 if timed else data_s)
        # Copied because the state is donated to the step.
        drafting = None if state.drafting is None else jax.tree.map(jnp.copy, state.drafting)
        if state.ahead:
            drafting = state.ahead[0].drafting
        self.clock.lap()
        compiles = step not in self.begun
        self.begun.add(step)
        try:
            name = f"step {number}" + (", compiling the stages of a probe" if timed else "")
            with showing_elapsed(name) if compiles else nullcontext():
                state, rollout, metrics = step(state, prompts)
        except MixedVersions as error:
            raise RunStopped(f"step {number}: {error}") from error
        if (compiling := self.clock.lap()) and not timed:
            console.print(f"the step is compiled, or read from the compile cache; waited {compiling:.1f} s for it")
        metrics = metrics | {"time/data": data_s, "memory/peak_gib": peak_gib(self.experiment.mesh)}
        metrics |= {"memory/host_gib": host_gib(), "memory/host_peak_gib": host_peak_gib()}
        if timed:
            metrics["time/step"] += data_s
        began = min(start + compiling, time.perf_counter())
        self.logs.timer.dispatched(DispatchedStep(number, began, metrics, trained, rollout, drafting))
        return state

    def is_probe(self, number: int) -> bool:
        return self.steps.probe is not None and is_due(number, self.experiment.config.probe_every)

    def choose_step(self, number: int) -> Callable[[TrainState, Prompts], StepResult]:
        """Return the probe, its rehearsal (in the step before a probe), or the compiled step.

        One rehearsal would be enough, but a resumed run must run the same programs as an uninterrupted one.
        """
        if self.steps.probe is not None and self.is_probe(number):
            return self.steps.probe
        if self.steps.probe is not None and self.is_probe(number + 1):
            return self.steps.probe.rehearse
        return self.steps.fused(drafts=self.costs is None or self.costs.used)

    def update_costs(self, number: int, state: TrainState) -> TrainState:
        """Return the state, with new costs if they change at this step. Before a probe, explain the draft lengths."""
        drafting, probing = state.drafting, self.is_probe(number)
        if self.costs is None or drafting is None:
            return state
        if self.costs.changes(number, probing, drafting):
            self.logs.timer.finish()
            if not self.costs.cells:
                console.print(f"step {number}: drafts may pay by now; measuring the costs of rounds ..")
            if not self.costs.used:
                # Compiles beside the rounds that are measured.
                compile_step(self.experiment, self.steps.whole)
            drafting = self.costs.refresh(state, number)
        if probing:
            config = self.experiment.config.rollout
            console.print(explain_choice(self.experiment.phases, config.draft_lengths, drafting))
        return replace(state, drafting=drafting)

    def profile_step(self, number: int, state: TrainState) -> TrainState:
        """Take a step and wait for it, with the JAX profiler on."""
        with jax.profiler.trace(str(self.logs.directory / PROFILE)):
            return jax.block_until_ready(self.take_step(number, state))

    def evaluate_if_due(self, number: int, state: TrainState) -> None:
        """Log the accuracy on held-out prompts with the metrics of the step."""
        if is_due(number, self.experiment.config.eval.every):
            self.logs.timer.wait()
            accuracy, truncated = self.evaluate(state)
            self.logs.timer.finish({"eval/accuracy": accuracy, "eval/truncated": truncated})
            self.logs.cut.evaluated(number, truncated)

    def save_if_due(self, number: int, state: TrainState, last: bool) -> None:
        """Save a checkpoint every `checkpoint.every` steps and after the last one; never if it is 0."""
        every = self.experiment.config.checkpoint.every
        if is_due(number, every) or (every and last):
            # Logged first: a run that is killed after the save resumes after the line of this step.
            self.logs.timer.finish()
            if is_due(number, every):
                self.warn_of_missing_score(number)
            self.save(number, state)

    def save(self, number: int, state: TrainState) -> None:
        with run_part("saving"):
            self._save(number, state)

    def _save(self, number: int, state: TrainState) -> None:
        best = self.experiment.config.checkpoint.best
        score = None if best is None else processes.agree(self.logs.timer.logged.get(best))
        extra = checkpoint_extra(self.experiment, self.start, self.costs)
        self.record_newest()
        if skipped := self.logs.skipped.in_a_row:
            # The state before the first of them cannot be trusted either: the step from it was skipped.
            self.saves.mark_unhealthy(number - skipped)
        self.saves.save(number, state, self.pipeline.get_state(), extra, score, healthy=not skipped)

    def record_newest(self) -> None:
        """Wait for the save in progress, and log that it is complete. Then nothing from before it is needed."""
        with run_part("saving"):
            newest = self.saves.newest()
        if newest is None:
            return
        self.long_phases.remove()
        if newest >= self.start.step:
            self.logs.events.record_checkpoint(newest)

    def warn_of_missing_score(self, number: int) -> None:
        """Warn if this step has not logged the metric by which the best checkpoint is chosen."""
        best, logged = self.experiment.config.checkpoint.best, self.logs.timer.logged
        if best is not None and logged.get(best) is None:
            names = ", ".join(sorted(name for name, value in logged.items() if value is not None))
            self.logs.events.warn(number, f"checkpoint.best = {best}: has no value in this step, which logged {names}")

    def warn_of_stop(self, number: int) -> None:
        saving = self.experiment.config.checkpoint.every
        saved = "--resume continues it" if saving else "no checkpoint was saved, because checkpoint.every = 0"
        self.logs.events.warn(number, f"stopped after step {number}; {saved}")
        if self.logs.skipped.reason is not None:
            self.logs.events.record_warning(number, self.logs.skipped.reason)


def is_due(number: int, every: int) -> bool:
    """Return whether step `number` is a multiple of `every`; 0 means never."""
    return every > 0 and number % every == 0

"""The logs of a run's steps, opened and closed together."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from launch.build.experiment import Experiment
from launch.cli.signals import StopSignals
from launch.run.draft_alerts import DraftSwitches, wrongly_loaded
from launch.run.draft_share import DraftShare
from launch.run.event_log import EventLog
from launch.run.learning_signal import LearningSignal
from launch.run.metric_log import MetricLog
from launch.run.sample_log import SampleLog
from launch.run.skipped_updates import SkippedUpdates
from launch.run.start import Start
from launch.run.step_timer import Step, StepTimer
from launch.run.wandb import wandb_log


@dataclass(frozen=True)
class RunLogs:
    """Open logs of a run.

    Attributes:
        directory: Directory of the run.
        events:    Event log: warnings and results.
        samples:   Log of sample completions.
        timer:     Times each step and logs its metrics.
        skipped:   Saves skipped batches; may end the run.
        signals:   Receives SIGTERM and SIGINT; may end the run.
    """

    directory: Path
    events: EventLog
    samples: SampleLog
    timer: StepTimer
    skipped: SkippedUpdates
    signals: StopSignals

    @property
    def must_stop(self) -> bool:
        """True if the run received a signal, or skipped too many updates in a row."""
        return self.signals.received is not None or self.skipped.reason is not None


@contextmanager
def open_logs(experiment: Experiment, directory: Path, start: Start, signals: StopSignals) -> Iterator[RunLogs]:
    """Open the logs of a run that starts or resumes. Entries of steps after the resumed one are dropped."""
    config = experiment.config
    resume_step = start.step if config.resume else None
    events, skipped = EventLog(directory, start.step), SkippedUpdates(directory, config.max_skipped, start.step)
    switches = DraftSwitches(experiment.phases, config.rollout.draft_lengths, events.warn)
    check, learning = check_first_step(experiment, events), LearningSignal(experiment.config, events.warn)
    with (
        wandb_log(config, directory) as also,
        MetricLog(directory, config.print_every, resume_step, also) as metrics,
    ):
        timer = StepTimer(DraftShare(metrics.log), (check, switches, learning, skipped))
        yield RunLogs(directory, events, SampleLog(directory, experiment, resume_step), timer, skipped, signals)


def check_first_step(experiment: Experiment, events: EventLog) -> Callable[[Step], None]:
    """Return an observer that warns after step 1 if the draft's checkpoint was loaded wrongly.

    Later steps are not checked: by then the draft has been trained and differs from its files.
    """

    def check(step: Step) -> None:
        predicted = step.metrics.get("draft/predicted_acceptance")
        if step.number == 1 and predicted is not None:
            alarm = wrongly_loaded(
                experiment.networks.draft, float(predicted), experiment.config.rollout.law.temperature
            )
            if alarm is not None:
                events.warn(1, alarm, style="bold red")

    return check

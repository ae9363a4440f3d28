"""Alarms and notices about a run's draft, with their causes and the next command, and its share of the time."""

import shlex
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from launch.cli.recipes import recipes
from launch.console import console
from launch.run.step_timer import DispatchedStep
from launch.setup.drafts.base import MORE_TRAINING, Draft
from launch.setup.experiment import Experiment
from launch.timing import interval, show_interval
from specjax.cost import Drafting, acceptance_length, batch_gain, choose, expected_speedup, rates
from specjax.parallel import processes
from specjax.rollout.plan import Phase, RolloutConfig
from specjax.train.draft.alarm import ALARM_MARGIN, ALARM_PATIENCE

Log = Callable[[int, Mapping[str, Any]], dict[str, float | None]]

# Any trained draft that was loaded correctly has at least this predicted acceptance at position 1.
LEAST_ACCEPTANCE = 0.2
# Steps that draft training's share of the time is measured over.
MOST_TIMED = 32
# A speed-up is measured over the last probes, and so many of them must agree before a run warns of a loss.
MOST_PROBES, LEAST_PROBES = 8, 3
# Why drafting is off while only draft length 0 has a cost.
NOT_MEASURED = "the costs of rounds are not measured yet, since at this acceptance drafts would not pay at any cost"
# Steps between two lines that say that drafting stays off.
SAY_EVERY = 32


class Alert(NamedTuple):
    """Text of an alert: what happened, its usual causes, and what to do next."""

    text: str
    causes: str
    advice: str

    def line(self, **values: object) -> str:
        """Return the alert with its values filled in."""
        return f"{self.text}. The usual causes: {self.causes}. Next: {self.advice}".format(**values)


NOT_ACCEPTED = Alert(
    f"ALARM at step {{step}}: the rollout accepts {{measured}} of its drafts at position 1, but training on the same "
    f"tokens promises at least {{promised}}, for {ALARM_PATIENCE} steps in a row. The output distribution is still "
    "exact, but drafting is broken",
    "a draft cache that is not rolled back or starts late, draft weights of an earlier step in the rollout, a verifier "
    "that accepts less than its law, a rollout in 8 bits (draft.rollout_dtype), in a drafter of your own `propose` and "
    "`loss` that read different things. A head that is read in a wrong way (layers, rope, vocabulary) cannot be the "
    "cause: training reads it in the same way",
    "{command} tells them apart",
)
# The stated acceptance holds for the prompts that it was measured on. A head distilled on GSM8K, which stated 0.45, had
# 0.21 on short instructions.
WRONGLY_LOADED = Alert(
    "ALARM: the draft of {read_from} has a predicted acceptance of {predicted:.2f} in the first step; {expected}. The "
    "output distribution is still exact",
    "it was trained on another domain of prompts than this run's; {causes}",
    f"{{command}}; if nothing is off, the draft needs {MORE_TRAINING}",
)
SLOWER = Alert(
    "  drafting loses: {measured}",
    "low acceptance, or rounds that cost much more with a draft, as with many slots or a small policy",
    "rollout.draft_lengths = (0, {draft_length}) drafts only when that is faster",
)


def acceptance_alarm(step: int, measured: float | None, promised: float | None, command: str) -> str:
    """Return the line that is logged with `draft/alarm`. Acceptance rates are those at position 1.

    measured: in the rollout. promised: by draft training on the same tokens. None is shown as "-".
    command:  launch.diagnose for the run.
    """
    measured_text, promised_text = ("-" if rate is None else f"{rate:.2f}" for rate in (measured, promised))
    return NOT_ACCEPTED.line(step=step, measured=measured_text, promised=promised_text, command=command)


def wrongly_loaded(draft: Draft, predicted: float, temperature: float, command: str) -> str | None:
    """Return an alarm if a draft from a checkpoint has too low a predicted acceptance in the first step; else None.

    `draft/alarm` cannot detect this: it compares predicted with measured acceptance, and both are low. The threshold is
    the acceptance that `made_for.json` states for the same temperature, less a margin, or else `LEAST_ACCEPTANCE`.

    Args:
        predicted:   `draft/predicted_acceptance` of the first step.
        temperature: of the run's sampling law.
        command:     launch.diagnose for the networks with which the run starts.
    """
    if draft.read_from is None:
        return None
    threshold, made_for = LEAST_ACCEPTANCE, draft.made_for
    expected = f"a trained draft has at least {LEAST_ACCEPTANCE} (no value for this temperature is stated beside it)"
    if made_for is not None and made_for.temperature == temperature and made_for.predicted_acceptance is not None:
        threshold = max(made_for.predicted_acceptance - ALARM_MARGIN, 0.0)
        stated = made_for.predicted_acceptance
        expected = f"its made_for.json states {stated:.2f}, measured with the policy {made_for.policy}"
    # NaN if the step had no token to predict.
    if not predicted < threshold:
        return None
    values = {"read_from": draft.read_from, "predicted": predicted, "expected": expected}
    return WRONGLY_LOADED.line(**values, causes=draft.usual_causes, command=command)


def diagnose_command(run: Path) -> str:
    """Return the launch.diagnose command for the networks of a run."""
    # A recipe may have the name of the directory.
    return f"python -m launch.diagnose {'./' * (str(run) in recipes())}{shlex.quote(str(run))}"


def first_step_check(experiment: Experiment, run: Path, warn: Callable[..., None]) -> Callable[[DispatchedStep], None]:
    """Return an observer that warns after step 1 if the draft's checkpoint was loaded wrongly.

    Later steps are not checked: by then the draft has been trained and differs from its files.

    run: directory of the run.
    """

    def check(step: DispatchedStep) -> None:
        predicted = step.metrics.get("draft/predicted_acceptance")
        if step.number == 1 and predicted is not None:
            rates = float(predicted), experiment.config.rollout.law.temperature
            command = f"{diagnose_command(run)} --checkpoint None"
            if (alarm := wrongly_loaded(experiment.networks.draft, *rates, command)) is not None:
                warn(1, alarm, style="bold red")

    return check


class DraftSpeed:
    """Observer of steps that prints after each probe the speed-up of generation over the last ones.

    Warns, once until it is over, if a fixed draft length is slower than none: if the interval of at least
    `LEAST_PROBES` probes is below 1.
    """

    def __init__(self, rollout: RolloutConfig, warn: Callable[[int, str], None]) -> None:
        self._rollout, self._warn, self._slower = rollout, warn, False
        self._speedups: deque[float] = deque(maxlen=MOST_PROBES)

    def __call__(self, step: DispatchedStep) -> None:
        if (speedup := step.metrics.get("perf/speedup_vs_autoregressive")) is None:
            return
        self._speedups.append(float(speedup))
        found, probes = interval(self._speedups), len(self._speedups)
        measured = f"{show_interval(found, '.2f', 'x')} the speed of draft length 0 in {count_probes(probes)}"
        slower = not self._rollout.draft_lengths and found[2] < 1 and probes >= LEAST_PROBES
        if slower and not self._slower:
            self._warn(step.number, SLOWER.line(measured=measured, draft_length=self._rollout.draft_length))
        else:
            console.print(f"  generation: {measured}")
        self._slower = slower


def count_probes(count: int) -> str:
    """Return the last so many probes, in words."""
    return f"the last {count} probes" if count > 1 else "one probe"


def explain_choice(phases: Sequence[Phase], draft_lengths: Sequence[int], drafting: Drafting) -> str:
    """Return one line per phase that explains its draft length by acceptance, gain and cost."""
    if not np.isfinite(drafting.seconds).all():
        return f"  draft length 0: {NOT_MEASURED}"
    lines, speedups = [], expected_speedup(drafting, draft_lengths).tolist()
    for phase, index in enumerate(choose(drafting, draft_lengths).tolist()):
        others = ", ".join(f"{k}: {x:.2f}" for k, x in zip(draft_lengths, speedups[phase], strict=True))
        lines.append(
            f"  draft length {draft_lengths[index]} at {_size(phases[phase])}: "
            f"{_estimate(drafting, draft_lengths, phase, index)}; predicted speed by draft length {others}"
        )
    return "\n".join(lines)


class DraftSwitches:
    """Step observer that reports with the reason where drafting turns off or on, and now and then that it stays off.

    say:     called with the step and the line.
    outlook: (seconds of a step) -> what will be done about a draft that is not used.
    """

    def __init__(
        self,
        phases: Sequence[Phase],
        draft_lengths: Sequence[int],
        say: Callable[[int, str], None],
        outlook: Callable[[float], str],
    ) -> None:
        self._phases, self._lengths, self._say, self._outlook = phases, draft_lengths, say, outlook
        self._previous: list[int] | None = None  # draft length by phase in the step before
        self._said = -SAY_EVERY  # last step with a line
        self._speedup = "not measured yet"

    def __call__(self, step: DispatchedStep) -> None:
        # A custom rollout function may not report its draft lengths.
        if step.drafting is None or step.rollout.draft_length is None or not any(self._lengths):
            return
        # All shards run at the same draft lengths.
        lengths_by_shard, drafting = processes.fetch((step.rollout.draft_length, step.drafting))
        lengths = lengths_by_shard[0].tolist()
        # The first step of the process is slower than the others: nothing is estimated from it.
        first = self._previous is None
        for phase, (previous, current) in enumerate(zip(self._previous or lengths, lengths, strict=True)):
            if (previous == 0) != (current == 0):
                self._say(step.number, self._line(step.number, phase, previous, current, drafting))
                self._said = step.number
        self._previous = lengths
        known = rates(drafting.acceptance)[0] > 0
        if not any(lengths) and known and not first and step.number >= self._said + SAY_EVERY:
            self._say(step.number, self._stays_off(step, drafting))
            self._said = step.number
        if (speedup := step.metrics.get("perf/speedup_vs_autoregressive")) is not None:
            self._speedup = f"measured at step {step.number}: {float(speedup):.2f}"

    def _stays_off(self, step: DispatchedStep, drafting: Drafting) -> str:
        """Return the line about the phase and draft length with the highest predicted speed-up."""
        speedups = np.array(expected_speedup(drafting, self._lengths))[:, 1:]
        phase, index = map(int, np.unravel_index(speedups.argmax(), speedups.shape))
        reason = (
            f"predicted speed-up {speedups[phase, index]:.2f} at draft length {self._lengths[index + 1]} in "
            f"{_size(self._phases[phase])}"
        )
        if not np.isfinite(drafting.seconds).all():
            reason = NOT_MEASURED
        return (
            f"step {step.number}: drafting stays off. Expected acceptance at position 1 "
            f"{float(rates(drafting.acceptance)[0]):.2f}; {reason}. {self._outlook(step.metrics['time/step'])}"
        )

    def _line(self, step: int, phase: int, previous: int, current: int, drafting: Drafting) -> str:
        """Return the line about one phase. previous, current: its draft lengths, one of which is 0."""
        k, acceptance = max(previous, current), drafting.acceptance
        index = self._lengths.index(k)
        rate = f"{float(acceptance.accepted[0] / acceptance.drafted[0]):.2f}" if acceptance.drafted[0] > 0 else "-"
        return (
            f"step {step}: drafting turns {'on' if current else 'off'} at {_size(self._phases[phase])}. Draft length "
            f"{k}: {_estimate(drafting, self._lengths, phase, index)}; acceptance at position 1 {rate}, predicted "
            f"{float(acceptance.predicted):.2f}; predicted speed-up "
            f"{float(expected_speedup(drafting, self._lengths)[phase, index]):.2f}, over all phases {self._speedup}"
        )


def _size(phase: Phase) -> str:
    return f"{phase.slots} slots of {phase.window} positions"


def _estimate(drafting: Drafting, draft_lengths: Sequence[int], phase: int, index: int) -> str:
    """Return the acceptance, gain and cost from which a draft length in a phase is judged."""
    length = float(acceptance_length(drafting.acceptance, draft_lengths)[index])
    gain = float(batch_gain(drafting, draft_lengths)[phase, index])
    cost = float(drafting.seconds[phase, index] / drafting.seconds[phase, 0])
    return (
        f"acceptance length {length:.2f}; a round replaces {gain:.2f} rounds of the batch at draft length "
        f"{draft_lengths[0]} and costs {cost:.2f} times one"
    )


class DraftShare:
    """Log that adds `time/draft_training` to each step before `log` writes it.

    It compares the median time of the last steps that trained the draft with that of the last that did not. Steps that
    compile or time themselves are left out.

    log: writes metrics and returns the values written.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._seconds: dict[bool, deque[float]] = {kind: deque(maxlen=MOST_TIMED) for kind in (True, False)}
        self._trained: deque[bool] = deque(maxlen=MOST_TIMED)
        self._first = True

    def __call__(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float | None]:
        """Add the share to the metrics of a step, and log them."""
        if "draft/trained" not in metrics:
            return self._log(step, metrics)
        trained = bool(metrics["draft/trained"])
        self._trained.append(trained)
        if not self._first and "time/generation" not in metrics and "time/step" in metrics:
            self._seconds[trained].append(float(metrics["time/step"]))
        self._first = False
        return self._log(step, {**metrics, "time/draft_training": self._share()})

    def _share(self) -> float | None:
        """Return the share of the time of the last steps; None until both kinds of step have been timed."""
        if not all(self._seconds.values()):
            return None
        with_draft, without = (statistics.median(self._seconds[kind]) for kind in (True, False))
        extra = statistics.fmean(self._trained) * max(with_draft - without, 0.0)
        return extra / (without + extra)

"""Print a run's progress: averages over some steps, and a table of stage times after each probe."""

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median

from rich.table import Column, Table

from launch.console import console, wide_console
from launch.phases.progress import duration
from launch.run.draft_monitor import acceptance_alarm, diagnose_command

HEADER = "   reward  accuracy  acc. length  tokens/s  s/step  length   cut  peak GiB"
HEADER_EVERY = 20
# The time left follows from the median of so many steps.
TIMED = 32
STAGES = ("data", "prepare", "generation", "reward", "logprob", "train", "step")
# Times of asynchronous steps, by the words for them.
ASYNCHRONOUS = {
    "time/training_mesh_idle": "exposed",
    "time/rollout_mesh_idle": "rollout mesh idle",
    "time/rollout_wait": "waited",
}
STAGES_TITLE = "  seconds of each stage; generation's tokens/s, and its speed-up over autoregressive"

SKIPPED = "the loss or the gradient of the {} is not finite, and its update is skipped"

Values = Mapping[str, float | None]


class StepPrinter:
    """Prints alarms, and a line of averages over the steps since the line before.

    A line comes at every n-th step, and at those with an evaluation, a probe or samples that were not scored. Called
    with a step and its metrics, and 0 for those from before the first step. A lasting alarm is printed once, when it
    begins.

    directory: of the run, for the commands that alarms name.
    last:      last step of the run, shown after each step's number; None: neither that nor the time left.
    rollout_function: the run's own, for the causes that alarms name.
    """

    def __init__(
        self, every: int, directory: Path, last: int | None = None, rollout_function: str | None = None
    ) -> None:
        self._directory, self._rollout_function = directory, rollout_function
        self._every, self._last, self._lines, self._alarms = every, last, 0, set[str]()
        self._steps: list[Values] = []
        # The first step of the process is slower than later ones.
        self._seconds, self._warm = deque[float](maxlen=TIMED), False

    def __call__(self, step: int, values: Values) -> None:
        if step == 0:
            console.print(f"held-out accuracy before the first step: {_show(values['eval/accuracy'], '.1%')}")
            return
        if self._begins("draft/alarm", values):
            measured, promised = values["draft/measured_acceptance"], values["draft/promised_acceptance"]
            command = diagnose_command(self._directory)
            console.print(acceptance_alarm(step, measured, promised, command), style="bold red")
        if self._begins("rollout/logprob_alarm", values):
            gaps = values["rollout/logprob_gap_mean"], values["rollout/sequence_logprob_gap_max"]
            console.print(logprob_alarm(step, *gaps, self._rollout_function), style="bold red")
        for name, network in (("update/skipped", "policy"), ("draft/skipped", "draft")):
            if values[name]:
                console.print(f"ALARM at step {step}: {SKIPPED.format(network)}", style="bold red")
        self._steps.append(values)
        if self._warm and values["time/step"] is not None:
            self._seconds.append(values["time/step"])
        self._warm = True
        special = values["eval/accuracy"], values["time/generation"], values["reward/failed"] or None
        if step % self._every and all(value is None for value in special):
            return
        width = 6 if self._last is None else max(6, 2 * len(str(self._last)) + 1)
        if self._lines % HEADER_EVERY == 0:
            console.print(f"{'step':>{width}}{HEADER}", style="bold")
        number, left = str(step), ""
        if self._last is not None:
            number = f"{step}/{self._last}"
            if self._seconds and step < self._last:
                left = f"  {duration(median(self._seconds) * (self._last - step))} left"
        console.print(f"{number:>{width}}{_line(self._steps, left)}")
        self._lines, self._steps = self._lines + 1, []
        if values["time/generation"] is not None:
            wide_console.print(_stages(values))

    def _begins(self, alarm: str, values: Values) -> bool:
        begins = bool(values[alarm]) and alarm not in self._alarms
        (self._alarms.add if values[alarm] else self._alarms.discard)(alarm)
        return begins


def logprob_alarm(step: int, gap: float | None, sequence_gap: float | None, rollout_function: str | None) -> str:
    """Return the line of `rollout/logprob_alarm`.

    gap: mean over tokens. sequence_gap: the largest of a whole sequence. None if it is not finite.
    rollout_function: of the user, which fills `Rollout.full`.
    """
    own = ""
    if rollout_function is not None:
        own = f". If rollout.function = {rollout_function} is meant to fill `full` with others, set gap_alarm = None"
    return (
        f"ALARM at step {step}: the log-probs of rollout and training differ by {_show(gap, '.3f')} on average "
        f"over tokens and by up to {_show(sequence_gap, '.3f')} over a sequence. Training sees another distribution "
        "than the one that generated the samples: compute in float32, or look for a difference between the two "
        f"forward passes{own}"
    )


def _line(steps: Sequence[Values], left: str) -> str:
    """Return the averages over `steps`, and after them the text `left`."""
    reward, accuracy, acceptance = (
        _mean(steps, name) for name in ("reward/mean", "reward/accuracy", "rollout/acceptance_length")
    )
    length, cut = _mean(steps, "rollout/length_mean"), _mean(steps, "rollout/truncated")
    # Of the device, if it is counted, and of the process.
    peaks = (steps[-1][name] for name in ("memory/peak_gib", "memory/host_peak_gib"))
    memory = "/".join(f"{peak:.1f}" for peak in peaks if peak is not None) or "-"
    tokens, seconds = _mean(steps, "rollout/tokens"), _mean(steps, "time/step")
    # Tokens/s of the whole step, which every step measures; the table of a probe shows generation alone.
    speed = tokens / seconds if tokens is not None and seconds else None
    line = (
        f"  {_show(reward, '.3f'):>7}  {_show(accuracy, '.1%'):>8}"
        f"  {_show(acceptance, '.2f'):>11}  {_show(speed, '.0f'):>8}  {_show(seconds, '.2f'):>6}"
        f"  {_show(length, '.0f'):>6}  {_show(cut, '.0%'):>4}  {memory:>8}{left}"
    )
    held_out, failed = steps[-1]["eval/accuracy"], sum(values["reward/failed"] or 0 for values in steps)
    if held_out is not None:
        line += f"  held out {held_out:.1%}"
    if (lag := steps[-1].get("asynchronous/lag")) is not None:
        line += f"  lag {lag:.0f}:" + ",".join(
            f" {_show(_mean(steps, metric), '.2f')} s {name}" for metric, name in ASYNCHRONOUS.items()
        )
    if any(values["draft/alarm"] for values in steps):
        line += "  draft alarm"
    if failed:
        line += f"  {failed:.0f} not scored"
    return line


def _mean(steps: Sequence[Values], metric: str) -> float | None:
    """Return the mean over the steps that have a value; None if none has."""
    values = [value for step in steps if (value := step[metric]) is not None]
    return fmean(values) if values else None


def _stages(values: Values) -> Table:
    columns = (Column(name, justify="right", no_wrap=True) for name in (*STAGES, "tokens/s", "speed-up"))
    table = Table(*columns, box=None, padding=(0, 0, 0, 2), title=STAGES_TITLE, title_justify="left")
    table.add_row(
        *(_show(values[f"time/{stage}"], ".3f") for stage in STAGES),
        _show(values["perf/generation_tokens_per_s"], ".0f"),
        _show(values["perf/speedup_vs_autoregressive"], ".2f"),
    )
    return table


def _show(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"

"""What a run leaves behind of every step: a line of metrics.jsonl, TensorBoard events, a line on the console."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from tensorboardX import SummaryWriter

from launch.run.console import StepPrinter
from launch.run.directory import METRICS_FILE, cut_lines


def metric_names(draft_length: int, rewards: Sequence[str] = ()) -> tuple[str, ...]:
    """Every metric of a step, in the order of the file; one acceptance rate for each position of a draft, and one mean
    for each of the `rewards` that are summed.
    """
    return (
        *("reward/mean", "reward/std", "reward/accuracy", "reward/failed", "reward/overlong"),
        *(f"reward/{name}" for name in rewards),
        "eval/accuracy",
        *("loss/policy", "loss/draft", "loss/clip_fraction", "ratio/mean", "ratio/max", "kl/reference", "entropy"),
        *("grad_norm/policy", "grad_norm/draft", "update/skipped", "draft/skipped"),
        *("groups/zero_variance", "groups/sequences_trained"),
        *("rollout/tokens", "rollout/rounds", "rollout/length_mean", "rollout/length_max", "rollout/truncated"),
        *("rollout/empty", "rollout/draft_length", "rollout/acceptance_length"),
        *(f"rollout/acceptance_rate_pos_{i + 1}" for i in range(draft_length)),
        *("draft/predicted_acceptance", "draft/promised_acceptance"),
        *("draft/measured_acceptance", "draft/alarm"),
        *("rollout/logprob_gap_mean", "rollout/logprob_gap_max", "rollout/logprob_alarm"),
        *("time/data", "time/prepare", "time/generation", "time/reward", "time/logprob", "time/train", "time/step"),
        *("perf/generation_tokens_per_s", "perf/speedup_vs_autoregressive"),
    )


class RunLogger:
    """Logs the steps of the run in `directory`.

    draft_length: K of the run's rollouts.
    print_every:  steps from one printed line to the next.
    resume_step:  the step that was restored; what was logged of later ones is dropped, so that none appears twice.
    rewards:      names of the parts of a reward that has some.
    also:         called with a step and what it measured.
    """

    def __init__(
        self,
        directory: Path,
        draft_length: int,
        print_every: int = 1,
        resume_step: int | None = None,
        rewards: Sequence[str] = (),
        also: Callable[[int, Mapping[str, float]], None] | None = None,
    ) -> None:
        self._names = metric_names(draft_length, rewards)
        path = directory / METRICS_FILE
        self._last = None if resume_step is None else cut_lines(path, resume_step)
        self._file = path.open("a", encoding="utf-8")
        # The time in an event file's name has seconds, in which a run may be resumed twice: the step tells them apart.
        start = 0 if resume_step is None else resume_step + 1
        self._events = SummaryWriter(str(directory), purge_step=start, filename_suffix=f".{start}")
        self._print, self._also = StepPrinter(print_every), also

    def __enter__(self) -> "RunLogger":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
        self._events.close()

    def log(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float | None]:
        """Record the metrics of a step, scalars of any kind: the file is complete to this step when it returns.

        Returns them as they are written.

        Names that are missing, and values that are not finite, which JSON does not know, are null. Raises ValueError
        for a name that is no metric, and for a step that is not behind the one logged before.
        """
        if unknown := sorted(metrics.keys() - set(self._names)):
            raise ValueError(f"{unknown[0]}: not a metric")
        if self._last is not None and step <= self._last:
            raise ValueError(f"step = {step}: must be behind {self._last}, which is logged already")
        self._last = step
        fetched = jax.device_get(dict(metrics))
        values = {name: _number(fetched.get(name)) for name in self._names}
        self._file.write(json.dumps({"step": step} | values) + "\n")
        self._file.flush()
        measured = {name: value for name, value in values.items() if value is not None}
        for name, value in measured.items():
            self._events.add_scalar(name, value, step)
        self._events.flush()
        if self._also is not None:
            self._also(step, measured)
        self._print(step, values)
        return values


def _number(value: Any) -> float | int | None:
    number = value.item() if hasattr(value, "item") else value
    return None if number is None or not math.isfinite(number) else number

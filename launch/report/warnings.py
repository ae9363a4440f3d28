"""Warnings of a run, from its metrics and its event log."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from launch.run.draft_monitor import acceptance_alarm, diagnose_command
from launch.run.records import RunRecords

# Largest number of warnings shown; the others are only counted.
MOST = 20
# Metrics that count what went wrong: their sum and the steps concerned.
COUNTS = {
    "reward/failed": "{} completions could not be scored, in {}; they do not train the policy",
    "rollout/failed": "{} completions have no reward: their environments failed, in {}; they do not train the policy",
    "update/skipped": "{} updates of the policy were skipped, in {}",
    "update/empty": "{} updates had nothing to learn from and changed nothing, in {}",
    "draft/skipped": "{} updates of the draft were skipped, in {}",
}
# Sections of docs/troubleshooting.md by what a warning says; the first that matches.
SECTIONS = {
    "log-prob": "the-log-prob-gap-rises",
    "routers": "routers-collapse",
    "skipped|not finite": "updates-are-skipped",
    "could not be scored": "reward-workers-die",
    "environment": "environments-fail",
    "checkpoint|resume|metrics of|is missing": "resume-refuses",
    "drafting (loses|turns|stays)": "speculation-is-slower-than-none",
    "draft|accept": "acceptance-falls",
    "learn|advantage|reward|dropped|cut by": "nothing-is-learnt",
}
GAPS = {"rollout/logprob_gap_mean": "on average", "rollout/sequence_logprob_gap_max": "over a sequence"}


def warnings(run: RunRecords, directory: Path) -> list[tuple[str, str]]:
    """Return (line, section of docs/troubleshooting.md) of each warning: damaged files first, then others by step.

    directory: of the run, for the commands that alarms name.
    """
    # A run that went on after a stop is no longer stopped.
    events = ((step, text) for step, text in run.events_of("warning") if not _went_on(run, step, text))
    by_step = sorted([*events, *_draft_alarms(run, directory), *_bad_steps(run)])
    lines = [text if f"step {step}" in text else f"step {step}: {text.strip()}" for step, text in by_step]
    lines = [*run.damaged, *lines]
    lines = [*lines[:MOST], f"and {len(lines) - MOST} more"] if len(lines) > MOST else lines
    return [(line, _section(line)) for line in lines]


def _went_on(run: RunRecords, step: int, text: str) -> bool:
    return text.startswith("stopped after") and any(later > step for later in run.steps)


def _section(line: str) -> str:
    # Neither names of the user's nor options say what the warning is about.
    words = " ".join(word for word in line.split() if "/" not in word and not word.startswith("--"))
    return next((section for pattern, section in SECTIONS.items() if re.search(pattern, words)), "")


def _draft_alarms(run: RunRecords, directory: Path) -> Iterator[tuple[int, str]]:
    """Yield a warning for each period in which the draft alarm was raised, with its first and last step."""
    steps, raised = run.measured("draft/alarm")
    command = diagnose_command(directory)
    changes = np.flatnonzero(np.diff(raised > 0, prepend=False, append=False))
    for start, end in zip(changes[::2], changes[1::2], strict=True):
        step = int(steps[start])
        measured, promised = (_value_at(run, f"draft/{name}_acceptance", step) for name in ("measured", "promised"))
        yield step, f"{acceptance_alarm(step, measured, promised, command)}. It lasted to step {steps[end - 1]}"


def _bad_steps(run: RunRecords) -> Iterator[tuple[int, str]]:
    """Yield (first step, text) for counted failures, gaps of log-probs, and losses and gradients that are not finite.

    metrics.jsonl stores a value that is not finite as null. Loss and gradient are measured in every step that trains a
    sequence, so null has no other cause there.
    """
    for metric, text in COUNTS.items():
        steps, counts = run.measured(metric)
        if (counts > 0).any():
            yield int(steps[counts > 0][0]), text.format(f"{counts.sum():.0f}", _steps(steps[counts > 0]))
    steps, raised = run.measured("rollout/logprob_alarm")
    if (raised > 0).any():
        affected = steps[raised > 0]
        worst = {name: max(_value_at(run, name, step) or np.inf for step in map(int, affected)) for name in GAPS}
        text = " and ".join(f"by up to {worst[name]:.3f} {GAPS[name]}" for name in GAPS if name in run.metrics)
        yield int(affected[0]), f"log-probs of rollout and training differed {text}, in {_steps(affected)}"
    trains = run.metrics.get("groups/sequences_trained", np.ones(len(run.steps))) != 0
    # Step 0 is the evaluation before training.
    trains &= run.steps > 0
    for name in ("loss/policy", "grad_norm/policy"):
        affected = run.steps[trains & ~np.isfinite(run.metrics.get(name, np.zeros(len(run.steps))))]
        if len(affected):
            yield int(affected[0]), f"{name} was not finite in {_steps(affected)}"


def _value_at(run: RunRecords, metric: str, step: int) -> float | None:
    steps, values = run.measured(metric)
    value = values[steps == step]
    return float(value[0]) if len(value) else None


def _steps(steps: np.ndarray) -> str:
    """Return "step 3" or "steps 3, 4"; of more than five steps, the first five "and 2 more"."""
    numbers = ", ".join(map(str, steps[:5]))
    return f"step{'s' if len(steps) > 1 else ''} {numbers}{f' and {len(steps) - 5} more' if len(steps) > 5 else ''}"

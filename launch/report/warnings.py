"""Warnings of a run, from its metrics and its event log."""

import numpy as np

from launch.run.draft_alerts import acceptance_alarm
from launch.run.records import Run

# Largest number of warnings shown; the others are only counted.
MOST = 20


def warnings(run: Run) -> list[str]:
    """Return the warnings, one line each: damaged files first, then the others by step."""
    found = [*_draft_alarms(run), *run.events_of("warning"), *_unscored(run), *_logprob_gap(run), *_not_finite(run)]
    lines = [text if f"step {step}" in text else f"step {step}: {text.strip()}" for step, text in sorted(found)]
    lines = [*run.damaged, *lines]
    return [*lines[:MOST], f"and {len(lines) - MOST} more"] if len(lines) > MOST else lines


def _draft_alarms(run: Run) -> list[tuple[int, str]]:
    """Return a warning for each period in which the draft alarm was raised, with its first and last step."""
    steps, raised = run.measured("draft/alarm")
    starts = np.flatnonzero((raised > 0) & ~np.concatenate([[False], raised[:-1] > 0]))
    lines = []
    for start in starts:
        cleared = np.flatnonzero(raised[start:] == 0)
        last = steps[-1] if len(cleared) == 0 else steps[start + cleared[0] - 1]
        acceptance = (_value_at(run, f"draft/{name}_acceptance", steps[start]) for name in ("measured", "promised"))
        lines.append(
            (int(steps[start]), f"{acceptance_alarm(int(steps[start]), *acceptance)}. It lasted to step {last}")
        )
    return lines


def _unscored(run: Run) -> list[tuple[int, str]]:
    steps, failed = run.measured("reward/failed")
    affected = steps[failed > 0]
    if not len(affected):
        return []
    text = f"{failed.sum():.0f} completions could not be scored, in {_steps(affected)}; they do not train the policy"
    return [(int(affected[0]), text)]


def _logprob_gap(run: Run) -> list[tuple[int, str]]:
    steps, raised = run.measured("rollout/logprob_alarm")
    affected = steps[raised > 0]
    if not len(affected):
        return []
    gaps = {"rollout/logprob_gap_mean": "on average", "rollout/sequence_logprob_gap_max": "over a sequence"}
    worst = {name: max(_value_at(run, name, step) or np.inf for step in affected) for name in gaps}
    text = " and ".join(f"by up to {worst[name]:.3f} {gaps[name]}" for name in gaps if name in run.metrics)
    return [(int(affected[0]), f"log-probs of rollout and training differed {text}, in {_steps(affected)}")]


def _not_finite(run: Run) -> list[tuple[int, str]]:
    """Return warnings about losses and gradients that were not finite, and about skipped updates.

    metrics.jsonl stores a value that is not finite as null. These metrics are measured in every step that trains a
    sequence, so null has no other cause there.
    """
    lines = []
    trains = run.metrics.get("groups/sequences_trained", np.ones(len(run.steps))) != 0
    for name in ("loss/policy", "grad_norm/policy"):
        affected = run.steps[~np.isfinite(run.metrics[name]) & trains] if name in run.metrics else run.steps[:0]
        if len(affected):
            lines.append((int(affected[0]), f"{name} was not finite in {_steps(affected)}"))
    for name, network in (("update/skipped", "policy"), ("draft/skipped", "draft")):
        steps, skipped = run.measured(name)
        affected = steps[skipped > 0]
        if len(affected):
            text = f"{skipped.sum():.0f} updates of the {network} were skipped, in {_steps(affected)}"
            lines.append((int(affected[0]), text))
    return lines


def _value_at(run: Run, metric: str, step: int) -> float | None:
    steps, values = run.measured(metric)
    value = values[steps == step]
    return float(value[0]) if len(value) else None


def _steps(steps: np.ndarray) -> str:
    """Return "step 3" or "steps 3, 4"; of more than five steps, the first five "and 2 more"."""
    listed = ", ".join(map(str, steps[:5]))
    return f"step{'s' if len(steps) > 1 else ''} {listed}{f' and {len(steps) - 5} more' if len(steps) > 5 else ''}"

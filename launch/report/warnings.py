"""Warnings about a run, from its metrics and its events."""

import numpy as np

from launch.run.draft_alerts import acceptance_alarm
from launch.run.records import Run

# Beyond these, only how many more.
MOST = 20


def warnings(run: Run) -> list[str]:
    """Return the warnings, one line each, in the order of their steps."""
    found = [*_alarms(run), *run.events_of("warning"), *_unscored(run), *_apart(run), *_not_finite(run)]
    lines = [text if f"step {step}" in text else f"step {step}: {text.strip()}" for step, text in sorted(found)]
    return [*lines[:MOST], f"and {len(lines) - MOST} more"] if len(lines) > MOST else lines


def _alarms(run: Run) -> list[tuple[int, str]]:
    steps, raised = run.measured("draft/alarm")
    begins = np.flatnonzero((raised > 0) & ~np.concatenate([[False], raised[:-1] > 0]))
    lines = []
    for begin in begins:
        over = np.flatnonzero(raised[begin:] == 0)
        last = steps[-1] if len(over) == 0 else steps[begin + over[0] - 1]
        acceptance = (_at(run, f"draft/{name}_acceptance", steps[begin]) for name in ("measured", "promised"))
        lines.append(
            (int(steps[begin]), f"{acceptance_alarm(int(steps[begin]), *acceptance)}. It lasted to step {last}")
        )
    return lines


def _unscored(run: Run) -> list[tuple[int, str]]:
    steps, failed = run.measured("reward/failed")
    at = steps[failed > 0]
    if not len(at):
        return []
    return [(int(at[0]), f"{failed.sum():.0f} completions could not be scored, in {_steps(at)}: they train no policy")]


def _apart(run: Run) -> list[tuple[int, str]]:
    steps, raised = run.measured("rollout/logprob_alarm")
    at = steps[raised > 0]
    if not len(at):
        return []
    worst = max(_at(run, "rollout/logprob_gap_mean", step) or np.inf for step in at)
    return [(int(at[0]), f"the log-probs of rollout and training lay up to {worst:.3f} apart, in {_steps(at)}")]


def _not_finite(run: Run) -> list[tuple[int, str]]:
    """Warn of steps whose loss or gradient is missing: every step measures these, so it was not finite."""
    lines = []
    for name in ("loss/policy", "grad_norm/policy"):
        at = run.steps[~np.isfinite(run.metrics[name])] if name in run.metrics else run.steps[:0]
        if len(at):
            lines.append((int(at[0]), f"{name} was not finite in {_steps(at)}"))
    for name, network in (("update/skipped", "policy"), ("draft/skipped", "draft")):
        steps, skipped = run.measured(name)
        if skipped.any():
            at = steps[skipped > 0]
            lines.append((int(at[0]), f"{skipped.sum():.0f} updates of the {network} were skipped, in {_steps(at)}"))
    return lines


def _at(run: Run, metric: str, step: int) -> float | None:
    steps, values = run.measured(metric)
    found = values[steps == step]
    return float(found[0]) if len(found) else None


def _steps(steps: np.ndarray) -> str:
    named = ", ".join(map(str, steps[:5]))
    return f"step{'s' if len(steps) > 1 else ''} {named}{f' and {len(steps) - 5} more' if len(steps) > 5 else ''}"

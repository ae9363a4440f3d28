"""Key figures of a run, the tiles at the top of its report."""

from collections.abc import Iterator
from itertools import chain

import numpy as np

from launch.phases.run_clock import TOTAL
from launch.run.draft_monitor import MOST_PROBES, count_probes
from launch.run.records import RunRecords
from launch.timing import interval, show_interval


def key_figures(run: RunRecords) -> Iterator[tuple[str, str]]:
    """Yield (value, label) of each key figure of the run, for the tiles at the top."""
    yield str(run.steps[-1] if len(run.steps) else 0), f"of {run.config.get('steps')} steps done"
    result = {name: value for _, values in run.events_of("result") for name, value in values.items()}
    if {"accuracy_before", "accuracy_after"} <= result.keys():
        yield f"{result['accuracy_after']:.1%}", f"held-out accuracy, {result['accuracy_before']:.1%} before RL"
    elif len(held_out := run.measured("eval/accuracy")[1]):
        yield f"{held_out[-1]:.1%}", "held-out accuracy, last"
    for metric, label, show in (
        ("reward/accuracy", "training accuracy", "{:.1%}".format),
        ("reward/mean", "reward", number),
        ("rollout/acceptance_length", "acceptance length", number),
    ):
        values = run.measured(metric)[1]
        if len(values):
            yield show(float(values[-max(len(values) // 10, 1) :].mean())), f"{label}, last tenth"
    if "step_speedup" in result:
        labels = {"generation": "generation speed-up at the end", "step": "step speed-up while acceptance holds"}
        for name, label in labels.items():
            speedup = result[f"{name}_speedup"]
            low, high = (result.get(f"{name}_speedup_{end}", speedup) for end in ("low", "high"))
            yield show_interval((speedup, low, high), ".2f", "x"), label
    elif "speedup" in result:
        yield f"{result['speedup']:.2f}x", "generation speed-up at the end"
    elif len(speedups := run.measured("perf/speedup_vs_autoregressive")[1].tolist()[-MOST_PROBES:]):
        yield show_interval(interval(speedups), ".2f", "x"), f"generation speed-up, {count_probes(len(speedups))}"
    exposed, steps = (run.metrics.get(name, np.zeros(0)) for name in ("time/training_mesh_idle", "time/step"))
    if (both := np.isfinite(exposed) & (steps > 0) if len(exposed) else exposed).any():
        yield f"{exposed[both].sum() / steps[both].sum():.1%}", "of the time of steps is exposed generation"
    if len(tokens := run.measured("rollout/tokens")[1]):
        yield number(float(tokens.sum())), "tokens generated"
    for metric, label in (("memory/peak_gib", "peak of a device"), ("memory/host_peak_gib", "peak of the process")):
        if len(peaks := run.measured(metric)[1]):
            yield f"{peaks.max():.1f} GiB", label
    if (times := run_times(run)) is not None:
        yield duration(times[TOTAL]), "time of the run"
    elif len(seconds := run.measured("time/step")[1]):
        yield duration(float(seconds.sum())), "total time of steps, without what is around them"


def run_times(run: RunRecords) -> dict[str, float] | None:
    """Return the seconds of the parts of the run, summed over the processes that continued it; None if one has none."""
    recorded, starts = [times for _, times in run.events_of("times") if TOTAL in times], run.events_of("start")
    if not recorded or len(recorded) < len(starts):
        return None
    return {part: sum(times.get(part, 0.0) for times in recorded) for part in dict.fromkeys(chain(*recorded))}


def number(value: float) -> str:
    """Return a value as text with about four digits: 16.4M."""
    for unit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 10 * unit:
            return f"{value / unit:.4g}{suffix}"
    return f"{value:.4g}"


def duration(seconds: float) -> str:
    """Return seconds as text, in s, min or h."""
    if seconds < 6000:
        return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"

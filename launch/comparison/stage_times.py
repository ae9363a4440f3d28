"""Stage times of the variants of a step, and the effect of faster generation on the whole step."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from launch.comparison.first_difference import FirstDifference, first_difference
from launch.comparison.variants import PLAIN, StepTime, Variant
from launch.timing import interleaved, interval

STAGES = ("data", "prepare", "generation", "reward", "logprob", "train")
Interval = tuple[float, float, float]


@dataclass(frozen=True)
class VariantReport:
    """Medians over the steps of a variant; speed-ups compare steps on the same prompts, with 95% intervals.

    Attributes:
        seconds:            median seconds of each stage.
        step_s:             median seconds of the whole step, timed separately.
        summed:             sum of the stages over step_s.
        alpha:              tokens per verification.
        tokens:             completion tokens of all steps.
        generation_speedup: over the autoregressive variant.
        step_speedup:       over the autoregressive variant.
        amdahl:             step speed-up that Amdahl's law gives for the measured generation speed-up.
        bound:              the same for alpha as the speed-up: a round costs as much as an autoregressive one
                            (arXiv 2604.26779, S_step).
        draft_lengths:      draft length of each phase.
        parting:            first difference from the autoregressive tokens; None if all are the same.
        turns:              seconds of each stage in each step, and of the whole step as `step`.
    """

    seconds: dict[str, float]
    step_s: float
    summed: float
    alpha: float
    tokens: int
    generation_speedup: Interval
    step_speedup: Interval
    amdahl: float
    bound: float
    draft_lengths: tuple[int, ...]
    parting: FirstDifference | None
    turns: list[dict[str, float]]


def step_speedup(share: float, generation_speedup: float) -> float:
    """Return the step's speed-up by Amdahl's law, if generation takes `share` of it and only generation is faster."""
    return 1 / (share / generation_speedup + 1 - share)


def time_variants(variants: Mapping[str, Variant], lengths: Sequence[int], steps: int) -> dict[str, VariantReport]:
    """Time the variants in turns, `steps` steps each. lengths: the draft lengths that `Variant.chosen` indexes."""
    times = interleaved({name: variant.time_step for name, variant in variants.items()}, steps)
    plain = times[PLAIN]
    share = statistics.median(step.seconds["generation"] for step in plain) / _step_s(plain)
    return {
        name: _report(times[name], plain, share, tuple(lengths[index] for index in variant.chosen or ()))
        for name, variant in variants.items()
    }


def _report(
    steps: Sequence[StepTime], plain: Sequence[StepTime], generation_share: float, draft_lengths: tuple[int, ...]
) -> VariantReport:
    pairs = list(zip(plain, steps, strict=True))
    faster = interval([a.seconds["generation"] / b.seconds["generation"] for a, b in pairs])
    differences = (first_difference(step, a.ids, a.rollout, b.rollout) for step, (a, b) in enumerate(pairs, start=1))
    alpha = statistics.fmean(float(step.metrics.get("rollout/acceptance_length", math.nan)) for step in steps)
    return VariantReport(
        seconds={stage: statistics.median(step.seconds[stage] for step in steps) for stage in STAGES},
        step_s=_step_s(steps),
        summed=statistics.median(sum(step.seconds.values()) / step.step_s for step in steps),
        alpha=alpha,
        tokens=sum(int(np.sum(step.rollout.lengths)) for step in steps),
        generation_speedup=faster,
        step_speedup=interval([a.step_s / b.step_s for a, b in pairs]),
        amdahl=step_speedup(generation_share, faster[0]),
        bound=step_speedup(generation_share, alpha),
        draft_lengths=draft_lengths,
        parting=next((each for each in differences if each is not None), None),
        turns=[step.seconds | {"step": step.step_s} for step in steps],
    )


def _step_s(steps: Sequence[StepTime]) -> float:
    return statistics.median(step.step_s for step in steps)


def print_stage_times(reports: Mapping[str, VariantReport], console: Console) -> None:
    """Print stage times and speed-ups, with the step speed-up that Amdahl's law predicts."""
    numbers = (*STAGES, "overall", "alpha", "generation x", "step x", "by Amdahl", "bound")
    columns = Column("draft length"), *(Column(name, justify="right", no_wrap=True) for name in numbers)
    title = "seconds of a step, medians; speed-ups over autoregressive, with 95% intervals"
    table = Table(*columns, box=None, padding=(0, 0, 0, 2), title=title, title_justify="left")
    for name, report in reports.items():
        seconds = (_seconds(report.seconds[stage]) for stage in STAGES)
        speedups = ("-",) * 4
        if name != PLAIN:
            speedups = (
                *(
                    f"{x:.2f} [{low:.2f}, {high:.2f}]"
                    for x, low, high in (report.generation_speedup, report.step_speedup)
                ),
                *(f"{x:.2f}" for x in (report.amdahl, report.bound)),
            )
        table.add_row(name, *seconds, _seconds(report.step_s), f"{report.alpha:.2f}", *speedups)
    console.print(table)
    plain = reports[PLAIN]
    share = plain.seconds["generation"] / plain.step_s
    console.print(
        f"generation is {share:.1%} of the autoregressive step: if it took no time, the step would be "
        f"{1 / (1 - share):.2f} times as fast"
    )
    console.print(
        "by Amdahl: the step's speed-up if only generation is faster; "
        "bound: the same if a round costs as much as an autoregressive one"
    )
    sums = [report.summed for report in reports.values()]
    console.print(f"the stages sum to {min(sums):.1%} .. {max(sums):.1%} of the step, which is timed by itself")


def print_first_differences(reports: Mapping[str, VariantReport], console: Console) -> None:
    """Print that all variants generated the same tokens, or where each one first differs."""
    differences = {name: report.parting for name, report in reports.items() if report.parting}
    if not differences:
        console.print(f"tokens: the same in all arms, {reports[PLAIN].tokens}")
    for name, difference in differences.items():
        console.print(f"tokens at draft length {name}: {difference}")


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value >= 100 else f"{value:.3g}"

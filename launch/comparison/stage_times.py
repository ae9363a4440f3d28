"""Stage times of each variant of a step, and the step speed-up that faster generation gives."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from configs.schema import RunConfig
from launch.comparison.first_difference import FirstDifference, first_difference
from launch.comparison.variants import PLAIN, StepTime, Variant
from launch.costs.turns import Record, timed_turns
from launch.phases.long_phases import long_phase
from launch.timing import describe_interval, interval, show_interval
from specjax.short_repr import short_repr

STAGES = ("data", "prepare", "generation", "reward", "logprob", "train")
# (median, low, high)
Interval = tuple[float, float, float]


@dataclass(frozen=True)
class VariantReport:
    """Times of a variant over its timed steps. Speed-ups pair steps on the same prompts, with 95% intervals.

    Attributes:
        seconds:            median seconds of each stage.
        step_s:             median seconds of the whole step, timed separately.
        summed:             sum of the stage times over the time of the whole step; median over the steps.
        alpha:              acceptance length, mean over the steps.
        tokens:             completion tokens of all steps.
        generation_speedup: over the autoregressive variant.
        trained_steps:      number of steps that trained the draft.
        draft_training_s:   extra seconds of a step that trains the draft, at least 0; None if all steps or no step
                            trained it.
        step_speedup:       over the autoregressive variant, where one in `max_every` steps trains the draft
                            (`steady_speedup`).
        amdahl:             step speed-up by Amdahl's law from the measured generation speed-up.
        bound:              step speed-up by Amdahl's law if generation were alpha times as fast, that is, if a
                            speculative round cost as much as an autoregressive one (arXiv 2604.26779, S_step).
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
    trained_steps: int
    draft_training_s: float | None
    step_speedup: Interval
    amdahl: float
    bound: float
    draft_lengths: tuple[int, ...]
    parting: FirstDifference | None
    turns: list[dict[str, float]]

    __repr__ = short_repr


def step_speedup(generation_share: float, generation_speedup: float) -> float:
    """Return the step's speed-up by Amdahl's law if only generation is faster.

    generation_share: generation's fraction of the step time before the speed-up.
    """
    return 1 / (generation_share / generation_speedup + 1 - generation_share)


def steady_speedup(plain: Sequence[Record], steps: Sequence[Record], max_every: int) -> tuple[float | None, Interval]:
    """Return the extra seconds of a step that trains the draft, and the step speed-up while acceptance holds.

    While acceptance holds, one in `max_every` steps trains the draft. So the speed-up uses the steps that do not train
    it, each made longer by 1 / `max_every` of the extra seconds. If all steps trained the draft, or none did, the extra
    seconds are None and the speed-up uses all steps.
    """
    train_s = {trained: [s["seconds"]["train"] for s in steps if s["trained"] is trained] for trained in (True, False)}
    if not all(train_s.values()):
        return None, interval([a["step_s"] / b["step_s"] for a, b in zip(plain, steps, strict=True)])
    training_s = max(statistics.median(train_s[True]) - statistics.median(train_s[False]), 0.0)
    pairs = ((a["step_s"], b["step_s"]) for a, b in zip(plain, steps, strict=True) if not b["trained"])
    return training_s, interval([a / (b + training_s / max_every) for a, b in pairs])


def time_variants(
    variants: Mapping[str, Variant],
    config: RunConfig,
    steps: int,
    console: Console,
    keep: Callable[[dict[str, VariantReport]], None],
) -> dict[str, VariantReport]:
    """Time `steps` steps of every variant in turns, print them and return the reports.

    Raises Stopped at a signal. Whatever ends the turns, those before are printed.

    config: of the run whose draft lengths `Variant.chosen` indexes.
    keep:   called after each turn with the reports of the turns so far.
    """
    # Each variant has already taken step 0, which compiled it.
    runs = {name: lambda turn, run=variant.time_step: run(turn + 1) for name, variant in variants.items()}
    phase = long_phase("timed steps", steps, f"steps of {len(variants)} variants", kept=False)
    lengths, max_every, reports = config.rollout.lengths, config.draft_training.max_every, dict[str, VariantReport]()
    chosen = {name: tuple(lengths[i] for i in variant.chosen or ()) for name, variant in variants.items()}

    def report(turns: list[Record]) -> None:
        times = {name: [turn[name] for turn in turns] for name in variants}
        reports.update({name: _report(times[name], times[PLAIN], chosen[name], max_every) for name in variants})
        keep(reports)

    try:
        timed_turns(phase, runs, _records, report)
    finally:
        if reports:
            print_stage_times(reports, console)
            if drafts_keep_tokens(config):
                print_first_differences(reports, console)
    return reports


def read_reports(arms: Mapping[str, dict[str, Any]]) -> dict[str, VariantReport]:
    """Return the reports from their JSON, as `launch.compare` writes it under "arms"."""
    partings: dict[str, Any] = {
        name: arm["parting"] and FirstDifference(**arm["parting"]) for name, arm in arms.items()
    }
    return {name: VariantReport(**arm | {"parting": partings[name]}) for name, arm in arms.items()}


def _records(steps: Mapping[str, StepTime]) -> dict[str, Record]:
    """Return the values to keep of one turn, by variant. Keeping the rollouts would need too much memory."""
    plain = steps[PLAIN]
    records = {}
    for name, step in steps.items():
        difference = first_difference(0, plain.ids, plain.rollout, step.rollout)
        records[name] = {
            "seconds": step.seconds,
            "step_s": step.step_s,
            # NaN if the step verified nothing.
            "alpha": float(step.metrics.get("rollout/acceptance_length", math.nan)),
            "tokens": int(np.sum(step.rollout.lengths)),
            "trained": bool(step.metrics.get("draft/trained", False)),
            "parting": None if difference is None else asdict(difference),
        }
    return records


def _report(
    steps: Sequence[Record],
    plain: Sequence[Record],
    draft_lengths: tuple[int, ...],
    max_every: int,
) -> VariantReport:
    generation_share = statistics.median(step["seconds"]["generation"] for step in plain) / _step_s(plain)
    pairs = list(zip(plain, steps, strict=True))
    generation_speedup = interval([a["seconds"]["generation"] / b["seconds"]["generation"] for a, b in pairs])
    differences = (
        FirstDifference(**step["parting"] | {"step": number})
        for number, step in enumerate(steps, start=1)
        if step["parting"] is not None
    )
    training_s, whole_steps = steady_speedup(plain, steps, max_every)
    alpha = statistics.fmean([step["alpha"] for step in steps if math.isfinite(step["alpha"])] or [math.nan])
    return VariantReport(
        seconds={stage: statistics.median(step["seconds"][stage] for step in steps) for stage in STAGES},
        step_s=_step_s(steps),
        summed=statistics.median(sum(step["seconds"].values()) / step["step_s"] for step in steps),
        alpha=alpha,
        tokens=sum(step["tokens"] for step in steps),
        generation_speedup=generation_speedup,
        trained_steps=sum(step["trained"] for step in steps),
        draft_training_s=training_s,
        step_speedup=whole_steps,
        amdahl=step_speedup(generation_share, generation_speedup[0]),
        bound=step_speedup(generation_share, alpha),
        draft_lengths=draft_lengths,
        parting=next(differences, None),
        turns=[step["seconds"] | {"step": step["step_s"]} for step in steps],
    )


def _step_s(steps: Sequence[Record]) -> float:
    """Return the median seconds of a whole step."""
    return statistics.median(step["step_s"] for step in steps)


def print_stage_times(reports: Mapping[str, VariantReport], console: Console) -> None:
    """Print a table of stage times and of speed-ups, both measured and by Amdahl's law."""
    numbers = (*STAGES, "overall", "alpha", "generation x", "step x", "by Amdahl", "bound")
    columns = Column("draft length"), *(Column(name, justify="right", no_wrap=True) for name in numbers)
    intervals = describe_interval(len(reports[PLAIN].turns))
    title = f"median seconds per stage; speed-ups over autoregressive{intervals}"
    table = Table(*columns, box=None, padding=(0, 0, 0, 2), title=title, title_justify="left")
    for name, report in reports.items():
        seconds = (_seconds(report.seconds[stage]) for stage in STAGES)
        speedups = ("-",) * 4
        if name != PLAIN:
            speedups = (
                *(show_interval(ratio, ".2f") for ratio in (report.generation_speedup, report.step_speedup)),
                *(f"{x:.2f}" for x in (report.amdahl, report.bound)),
            )
        table.add_row(name, *seconds, _seconds(report.step_s), f"{report.alpha:.2f}", *speedups)
    console.print(table)
    plain = reports[PLAIN]
    generation_share = plain.seconds["generation"] / plain.step_s
    console.print(
        f"generation takes {generation_share:.1%} of the autoregressive step; without it the step would be "
        f"{1 / (1 - generation_share):.2f} times as fast"
    )
    trained = {name: report for name, report in reports.items() if report.draft_training_s is not None}
    if trained:
        steps = sum(report.trained_steps for report in trained.values())
        extra = ", ".join(f"{name} {_seconds(report.draft_training_s or 0.0)} s" for name, report in trained.items())
        console.print(
            "step x: while acceptance holds, when one in --draft-training.max-every steps trains the draft; extra "
            f"seconds of a step that trains it: {extra} (measured in {steps} steps). "
            "While the draft still learns, most steps train it (see time/draft_training of a run)"
        )
    console.print(
        "alpha: acceptance length; by Amdahl: step speed-up from the measured generation speed-up; "
        "bound: the same if a speculative round cost as much as an autoregressive one"
    )
    sums = [report.summed for report in reports.values()]
    console.print(f"the stages sum to {min(sums):.1%} .. {max(sums):.1%} of the step, which is timed separately")


def drafts_keep_tokens(config: RunConfig) -> bool:
    """Return whether drafts must leave the very tokens unchanged, not only their distribution.

    Greedy and coupled decoding do in float32. In bfloat16 rounding may decide between two tokens.
    """
    rollout = config.rollout
    return config.model.dtype == "float32" and (rollout.verifier == "coupled" or rollout.law.temperature == 0)


def print_first_differences(reports: Mapping[str, VariantReport], console: Console) -> None:
    """Print that all variants generated the same tokens, as they must, or each one's first difference."""
    differences = {name: report.parting for name, report in reports.items() if report.parting}
    if not differences:
        console.print(f"all variants generated the same {reports[PLAIN].tokens} tokens")
    for name, difference in differences.items():
        console.print(f"draft length {name} changed tokens: {difference}")


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value >= 100 else f"{value:.3g}"

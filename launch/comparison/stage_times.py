"""What the arms of a comparison come to: the stages of a step, and what a faster generation makes of the whole."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from launch.comparison.first_difference import Parting, parting
from launch.comparison.variants import PLAIN, Turn
from launch.timing import interval

STAGES = ("data", "prepare", "generation", "reward", "logprob", "train")
Interval = tuple[float, float, float]


@dataclass(frozen=True)
class ArmReport:
    """Medians over the turns of an arm; a speed-up is that of turns of the same prompts, with its 95% interval.

    seconds:       of each stage. step_s: of the whole step, on a clock of its own.
    summed:        the stages' sum over step_s.
    alpha:         tokens a verification, over all turns. tokens: of the completions of all turns.
    amdahl:        the step's speed-up that follows from the share of generation and its speed-up alone.
    bound:         the same if a round cost what an autoregressive one costs (arXiv 2604.26779, S_step).
    draft_lengths: of each phase.
    parting:       where its tokens first differ from the autoregressive ones; None where they do not.
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
    parting: Parting | None


def step_speedup(share: float, generation_speedup: float) -> float:
    """Amdahl's law: of a step of which `share` is generation, where that alone is so many times as fast."""
    return 1 / (share / generation_speedup + 1 - share)


def compare(turns: Mapping[str, Sequence[Turn]], draft_lengths: Mapping[str, tuple[int, ...]]) -> dict[str, ArmReport]:
    """The arms by name, the autoregressive among them."""
    plain = turns[PLAIN]
    share = statistics.median(turn.seconds["generation"] for turn in plain) / _step_s(plain)
    return {name: _report(own, plain, share, draft_lengths[name]) for name, own in turns.items()}


def _report(own: Sequence[Turn], plain: Sequence[Turn], share: float, draft_lengths: tuple[int, ...]) -> ArmReport:
    pairs = list(zip(plain, own, strict=True))
    faster = interval([a.seconds["generation"] / b.seconds["generation"] for a, b in pairs])
    apart = (parting(step, a.ids, a.rollout, b.rollout) for step, (a, b) in enumerate(pairs, start=1))
    alpha = statistics.fmean(turn.alpha for turn in own)
    return ArmReport(
        seconds={stage: statistics.median(turn.seconds[stage] for turn in own) for stage in STAGES},
        step_s=_step_s(own),
        summed=statistics.median(sum(turn.seconds.values()) / turn.step_s for turn in own),
        alpha=alpha,
        tokens=sum(int(np.sum(turn.rollout.lengths)) for turn in own),
        generation_speedup=faster,
        step_speedup=interval([a.step_s / b.step_s for a, b in pairs]),
        amdahl=step_speedup(share, faster[0]),
        bound=step_speedup(share, alpha),
        draft_lengths=draft_lengths,
        parting=next((each for each in apart if each is not None), None),
    )


def _step_s(turns: Sequence[Turn]) -> float:
    return statistics.median(turn.step_s for turn in turns)


def print_comparison(reports: Mapping[str, ArmReport], console: Console) -> None:
    """The paper's table, with what it leaves out: rewards, and what Amdahl's law makes of the generation's speed-up."""
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
        "by Amdahl: what that share and the generation's speed-up make of the step; "
        "bound: if a round cost what an autoregressive one costs"
    )
    sums = [report.summed for report in reports.values()]
    console.print(f"the stages sum to {min(sums):.1%} .. {max(sums):.1%} of the step, which is timed by itself")


def print_partings(reports: Mapping[str, ArmReport], console: Console) -> None:
    """Whether all arms generated the same tokens, or where each first did not."""
    apart = {name: report.parting for name, report in reports.items() if report.parting is not None}
    if not apart:
        console.print(f"tokens: the same in all arms, {reports[PLAIN].tokens}")
    for name, where in apart.items():
        console.print(f"tokens at draft length {name}: {where}")


def as_json(reports: Mapping[str, ArmReport], turns: Mapping[str, Sequence[Turn]]) -> dict[str, Any]:
    """By name: every field of the report, an interval as (median, low, high), and the seconds of each turn."""
    return {
        name: asdict(report)
        | {"parting": None if report.parting is None else report.parting._asdict()}
        | {"turns": [turn.seconds | {"step": turn.step_s} for turn in turns[name]]}
        for name, report in reports.items()
    }


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value >= 100 else f"{value:.3g}"

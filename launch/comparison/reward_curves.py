"""Two arms of a comparison trained side by side: what they are rewarded, step by step, and where they part."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from launch.cli.pyplot import load_pyplot
from launch.comparison.first_difference import Parting, parting
from launch.comparison.variants import Arm
from specjax.types import Rollout

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 60
MEASURES = {"reward": "reward/mean", "accuracy": "reward/accuracy"}


@dataclass(frozen=True)
class Curve:
    """Of one arm: its mean reward and the share that was right in each step, and the seconds of all steps."""

    reward: list[float]
    accuracy: list[float]
    seconds: float


def train_both(plain: Arm, other: Arm, steps: int) -> tuple[Curve, Curve, Parting | None]:
    """Both from their start, one after the other, on the same prompts, and where `other` first has other tokens."""
    curves, kept, apart = [], [], None
    for arm in (plain, other):
        values, seconds = {name: [] for name in MEASURES}, 0.0
        for number, (ids, rollout, metrics, step_s) in enumerate(arm.train(steps), start=1):
            for name, metric in MEASURES.items():
                values[name].append(float(metrics[metric]))
            seconds += step_s
            if arm is plain:
                # What is compared, of all steps at once.
                kept.append(Rollout(rollout.tokens, rollout.lengths))
            elif apart is None:
                apart = parting(number, ids, kept[number - 1], rollout)
        curves.append(Curve(**values, seconds=seconds))
    return *curves, apart


def print_curves(
    curves: Mapping[str, Curve], apart: Parting | None, verifier: str, dtype: str, console: Console
) -> None:
    """The curves as lines of bars on one scale, means of their first and last quarters, and where the runs part."""
    steps = len(next(iter(curves.values())).reward)
    quarter = -(-steps // 4)
    for name in MEASURES:
        rows = {arm: getattr(curve, name) for arm, curve in curves.items()}
        known = [value for row in rows.values() for value in row if np.isfinite(value)]
        low, high = (min(known), max(known)) if known else (0.0, 0.0)
        columns = Column(), Column(f"{name}, {low:.3g} .. {high:.3g}"), f"first {quarter}", f"last {quarter}", "seconds"
        table = Table(*columns, box=None, padding=(0, 2, 0, 0))
        for arm, row in rows.items():
            means = (f"{_mean(part):.3f}" for part in (row[:quarter], row[-quarter:]))
            table.add_row(arm, sparkline(row, low, high), *means, f"{curves[arm].seconds:.3g}")
        console.print(table)
    if apart is None:
        console.print(f"the two runs are identical: the same tokens in all {steps} steps")
    elif verifier == "coupled":
        why = "a near-tie that rounding flips" if dtype == "float32" else f"which {dtype} rounds to often"
        console.print(f"the two runs: {apart} ({why})")
    else:
        console.print(f"the two runs: {apart} (verifier {verifier} keeps the law; coupled keeps the tokens)")


def sparkline(values: Sequence[float], low: float, high: float) -> str:
    """The values as bars between the two levels; of more than there is width for, means of neighbours.

    A gap stands for those that are no numbers, as the reward is of a step in which nothing could be scored.
    """
    parts = [part.tolist() for part in np.array_split(np.asarray(values), min(len(values), WIDTH))]
    share = (np.array([_mean(part) for part in parts]) - low) / (high - low if high > low else 1)
    return "".join(BARS[round(x * (len(BARS) - 1))] if np.isfinite(x) else " " for x in np.clip(share, 0, 1).tolist())


def _mean(values: Sequence[float]) -> float:
    """Of those that are numbers; NaN where none is."""
    known = [value for value in values if np.isfinite(value)]
    return float(np.mean(known)) if known else math.nan


def save_plot(directory: Path, curves: Mapping[str, Curve]) -> None:
    """curves.png in the directory: both measures, a line for each arm."""
    plt = load_pyplot()
    figure, axes = plt.subplots(1, len(MEASURES), figsize=(10, 4), layout="constrained", squeeze=False)
    for axis, name in zip(axes[0], MEASURES, strict=True):
        # The second is dashed: where both are the same, both are seen.
        for (arm, curve), style in zip(curves.items(), ("-", "--"), strict=True):
            values = getattr(curve, name)
            axis.plot(range(1, len(values) + 1), values, style, label=arm)
        axis.set_xlabel("step")
        axis.set_ylabel(name)
        axis.legend(fontsize="small")
    figure.savefig(directory / "curves.png", dpi=150)
    plt.close(figure)


def as_json(curves: Mapping[str, Curve], apart: Parting | None) -> dict[str, Any]:
    """{"curves": {arm: {reward, accuracy, seconds}}, "parting": where the runs part, or None}; None for no number"""
    arms = {
        arm: {name: [value if math.isfinite(value) else None for value in getattr(curve, name)] for name in MEASURES}
        | {"seconds": curve.seconds}
        for arm, curve in curves.items()
    }
    return {"curves": arms, "parting": None if apart is None else apart._asdict()}

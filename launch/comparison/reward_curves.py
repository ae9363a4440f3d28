"""Two variants trained on the same prompts: their rewards, step by step, and where their tokens first differ."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Column, Table

from launch.build.experiment import Experiment
from launch.cli.pyplot import load_pyplot
from launch.comparison.first_difference import FirstDifference, first_difference
from launch.comparison.variants import AUTOMATIC, PLAIN, Variant
from specjax.types import Rollout

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 60
MEASURES = {"reward": "reward/mean", "accuracy": "reward/accuracy"}


@dataclass
class RewardCurve:
    """The mean reward and the share of correct completions in each step of a variant, and the seconds of all steps."""

    reward: list[float]
    accuracy: list[float]
    seconds: float


def compare_training(
    experiment: Experiment, variants: Mapping[str, Variant], steps: int, plots: str | None, console: Console
) -> dict[str, Any]:
    """Train the autoregressive and the automatic variant; print their rewards, draw them into `plots`, return both."""
    curves, difference = train_both({name: variants[name] for name in (PLAIN, AUTOMATIC)}, steps)
    verifier, dtype = str(experiment.config.rollout.verifier), jnp.dtype(experiment.networks.policy.dtype).name
    print_reward_curves(curves, difference, verifier, dtype, console)
    if plots is not None:
        save_plot(Path(plots), curves)
    return reward_curves_json(curves, difference)


def train_both(variants: Mapping[str, Variant], steps: int) -> tuple[dict[str, RewardCurve], FirstDifference | None]:
    """Train two variants from their start, one after the other, on the same prompts.

    Return their curves, and where the second first differs from the first.
    """
    curves, rollouts, difference = {}, [], None
    for name, variant in variants.items():
        curves[name] = RewardCurve([], [], 0.0)
        for number, step in enumerate(variant.train(steps), start=1):
            for measure, metric in MEASURES.items():
                getattr(curves[name], measure).append(float(step.metrics[metric]))
            curves[name].seconds += step.step_s
            if len(curves) == 1:
                # Only what is compared: it is kept for all steps.
                rollouts.append(Rollout(step.rollout.tokens, step.rollout.lengths))
            elif difference is None:
                difference = first_difference(number, step.ids, rollouts[number - 1], step.rollout)
    return curves, difference


def print_reward_curves(
    curves: Mapping[str, RewardCurve], difference: FirstDifference | None, verifier: str, dtype: str, console: Console
) -> None:
    """Print the curves as bars on one scale, means of their first and last quarters, and where the runs differ."""
    steps = len(next(iter(curves.values())).reward)
    quarter = -(-steps // 4)
    for name in MEASURES:
        rows = {variant: getattr(curve, name) for variant, curve in curves.items()}
        known = [value for row in rows.values() for value in row if np.isfinite(value)]
        low, high = (min(known), max(known)) if known else (0.0, 0.0)
        columns = Column(), Column(f"{name}, {low:.3g} .. {high:.3g}"), f"first {quarter}", f"last {quarter}", "seconds"
        table = Table(*columns, box=None, padding=(0, 2, 0, 0))
        for variant, row in rows.items():
            means = (f"{_mean(part):.3f}" for part in (row[:quarter], row[-quarter:]))
            table.add_row(variant, sparkline(row, low, high), *means, f"{curves[variant].seconds:.3g}")
        console.print(table)
    if difference is None:
        console.print(f"the two runs are identical: the same tokens in all {steps} steps")
    elif verifier == "coupled":
        why = "a near-tie that rounding flips" if dtype == "float32" else f"which {dtype} rounds to often"
        console.print(f"the two runs: {difference} ({why})")
    else:
        console.print(f"the two runs: {difference} (verifier {verifier} keeps the law; coupled keeps the tokens)")


def sparkline(values: Sequence[float], low: float, high: float) -> str:
    """Return the values as bars between the two levels; if there are too many, means of neighbours.

    A gap stands for NaN, the reward of a step in which nothing could be scored.
    """
    parts = [part.tolist() for part in np.array_split(np.asarray(values), min(len(values), WIDTH))]
    share = (np.array([_mean(part) for part in parts]) - low) / (high - low if high > low else 1)
    return "".join(BARS[round(x * (len(BARS) - 1))] if np.isfinite(x) else " " for x in np.clip(share, 0, 1).tolist())


def _mean(values: Sequence[float]) -> float:
    """Return the mean of the finite values, NaN if there are none."""
    known = [value for value in values if np.isfinite(value)]
    return float(np.mean(known)) if known else math.nan


def save_plot(directory: Path, curves: Mapping[str, RewardCurve]) -> None:
    """Write curves.png into the directory: both measures, a line for each variant."""
    plt = load_pyplot()
    figure, axes = plt.subplots(1, len(MEASURES), figsize=(10, 4), layout="constrained", squeeze=False)
    for axis, name in zip(axes[0], MEASURES, strict=True):
        # The second is dashed: where both are the same, both are seen.
        for (variant, curve), style in zip(curves.items(), ("-", "--"), strict=True):
            values = getattr(curve, name)
            axis.plot(range(1, len(values) + 1), values, style, label=variant)
        axis.set_xlabel("step")
        axis.set_ylabel(name)
        axis.legend(fontsize="small")
    figure.savefig(directory / "curves.png", dpi=150)
    plt.close(figure)


def reward_curves_json(curves: Mapping[str, RewardCurve], difference: FirstDifference | None) -> dict[str, Any]:
    """Return {"curves": {variant: {reward, accuracy, seconds}}, "parting": the first difference or None}."""

    found: dict[str, Any] = {name: asdict(curve) for name, curve in curves.items()}
    for curve in found.values():
        for name in MEASURES:
            curve[name] = [value if math.isfinite(value) else None for value in curve[name]]
    return {"curves": found, "parting": None if difference is None else asdict(difference)}

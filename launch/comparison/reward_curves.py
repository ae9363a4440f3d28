"""Reward curves of two variants trained on the same prompts, and the first token in which they differ."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Column, Table

from launch.cli.pyplot import load_pyplot
from launch.cli.unfinished import Unfinished
from launch.comparison.first_difference import FirstDifference, first_difference
from launch.comparison.variants import AUTOMATIC, PLAIN, Variant
from launch.setup.experiment import Experiment
from specjax.parallel import processes
from specjax.types import Rollout

BARS = "▁▂▃▄▅▆▇█"
# Most characters of a sparkline.
WIDTH = 60
# Metric of each curve.
MEASURES = {"reward": "reward/mean", "accuracy": "reward/accuracy"}


@dataclass
class RewardCurve:
    """Reward curve of a variant.

    reward:   mean reward of each step, NaN if no completion could be scored.
    accuracy: fraction of correct completions in each step.
    seconds:  total time of all steps.
    """

    reward: list[float]
    accuracy: list[float]
    seconds: float


def compare_training(
    experiment: Experiment,
    variants: Mapping[str, Variant],
    steps: int,
    plots: str | None,
    console: Console,
    unfinished: Unfinished,
) -> dict[str, Any]:
    """Train the autoregressive and the automatic variant, print their reward curves and return them as JSON.

    plots: directory for curves.png; None draws nothing.
    """
    curves, difference = train_both({name: variants[name] for name in (PLAIN, AUTOMATIC)}, steps, unfinished)
    verifier, dtype = str(experiment.config.rollout.verifier), jnp.dtype(experiment.networks.policy.dtype).name
    print_reward_curves(curves, difference, verifier, dtype, console)
    if plots is not None:
        save_plot(Path(plots), curves)
    return reward_curves_json(curves, difference)


def train_both(
    variants: Mapping[str, Variant], steps: int, unfinished: Unfinished
) -> tuple[dict[str, RewardCurve], FirstDifference | None]:
    """Train two variants from their initial states, one after the other, on the same prompts.

    Returns their curves by name, and the first difference of the second run's tokens from the first's (None if there is
    none). Raises Stopped at a signal.
    """
    trained = {name: _train(variant, name, steps, unfinished) for name, variant in variants.items()}
    curves = {
        name: RewardCurve(each["reward"].tolist(), each["accuracy"].tolist(), float(each["seconds"].sum()))
        for name, each in trained.items()
    }
    rollouts = (
        [Rollout(*pair) for pair in zip(each["tokens"], each["lengths"], strict=True)] for each in trained.values()
    )
    ids = next(iter(trained.values()))["ids"]
    differences = map(first_difference, range(1, steps + 1), ids, *rollouts)
    return curves, next((difference for difference in differences if difference is not None), None)


def _train(variant: Variant, name: str, steps: int, unfinished: Unfinished) -> dict[str, np.ndarray]:
    """Train a variant. Return its measures and seconds, [steps], and its ids, tokens and lengths, [steps, ..]."""
    with unfinished.phase(f"training with draft length {name}", steps, "steps") as phase:
        start = phase.restore("state", jax.tree.map(jnp.copy, variant.start))
        taken = phase.restore("steps") or {}
        for state, step in variant.train(start, phase.done, steps):
            # Keep only what is compared: these arrays of all steps stay in memory.
            new = {"seconds": step.step_s, "ids": step.ids}
            new |= {"tokens": step.rollout.tokens, "lengths": step.rollout.lengths}
            new |= {measure: float(step.metrics[metric]) for measure, metric in MEASURES.items()}
            rows = {field: np.array(value)[None] for field, value in processes.fetch(new).items()}
            taken = {field: np.concatenate([taken[field], row]) if taken else row for field, row in rows.items()}
            phase.finish({"state": state, "steps": taken}, tokens=int(np.sum(step.rollout.lengths)))
    return taken


def print_reward_curves(
    curves: Mapping[str, RewardCurve], difference: FirstDifference | None, verifier: str, dtype: str, console: Console
) -> None:
    """Print each curve as a sparkline with the means of its first and last quarter, then the first difference.

    The sparklines of one measure share a scale.
    """
    steps = len(next(iter(curves.values())).reward)
    quarter = -(-steps // 4)
    for name in MEASURES:
        values_by_variant = {variant: getattr(curve, name) for variant, curve in curves.items()}
        finite = [value for values in values_by_variant.values() for value in values if np.isfinite(value)]
        low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
        columns = Column(), Column(f"{name}, {low:.3g} .. {high:.3g}"), f"first {quarter}", f"last {quarter}", "seconds"
        table = Table(*columns, box=None, padding=(0, 2, 0, 0))
        for variant, values in values_by_variant.items():
            means = (f"{_mean(part):.3f}" for part in (values[:quarter], values[-quarter:]))
            table.add_row(variant, sparkline(values, low, high), *means, f"{curves[variant].seconds:.3g}")
        console.print(table)
    if difference is None:
        console.print(f"both runs generated the same tokens in all {steps} steps")
    elif verifier == "coupled":
        cause = "rounding can flip a near-tie" if dtype == "float32" else f"rounding in {dtype} often flips near-ties"
        console.print(f"{difference} ({cause})")
    else:
        console.print(f"{difference} (verifier {verifier} keeps the distribution, coupled also the tokens)")


def sparkline(values: Sequence[float], low: float, high: float) -> str:
    """Return the values as a line of bars, the lowest at `low` and the highest at `high`.

    More than WIDTH values are averaged in equal parts. NaN (no completion could be scored) becomes a gap.
    """
    parts = [part.tolist() for part in np.array_split(values, min(len(values), WIDTH))]
    heights = np.clip((np.array([_mean(part) for part in parts]) - low) / (high - low if high > low else 1), 0, 1)
    return "".join(BARS[round(x * (len(BARS) - 1))] if np.isfinite(x) else " " for x in heights.tolist())


def _mean(values: Sequence[float]) -> float:
    """Return the mean of the finite values, NaN if there are none."""
    finite = [value for value in values if np.isfinite(value)]
    return float(np.mean(finite)) if finite else math.nan


def save_plot(directory: Path, curves: Mapping[str, RewardCurve]) -> None:
    """Write curves.png into the directory: one plot per measure, one line per variant."""
    plt = load_pyplot()
    figure, axes = plt.subplots(1, len(MEASURES), figsize=(10, 4), layout="constrained", squeeze=False)
    for axis, name in zip(axes[0], MEASURES, strict=True):
        # The second line is dashed, so that both are visible where they coincide.
        for (variant, curve), style in zip(curves.items(), ("-", "--"), strict=True):
            values = getattr(curve, name)
            axis.plot(range(1, len(values) + 1), values, style, label=variant)
        axis.set_xlabel("step")
        axis.set_ylabel(name)
        axis.legend(fontsize="small")
    figure.savefig(directory / "curves.png", dpi=150)
    plt.close(figure)


def reward_curves_json(curves: Mapping[str, RewardCurve], difference: FirstDifference | None) -> dict[str, Any]:
    """Return {"curves": {variant: {reward, accuracy, seconds}}, "parting": first difference or None}.

    A NaN in a curve becomes None.
    """
    records: dict[str, Any] = {name: asdict(curve) for name, curve in curves.items()}
    for record in records.values():
        for name in MEASURES:
            record[name] = [value if math.isfinite(value) else None for value in record[name]]
    return {"curves": records, "parting": None if difference is None else asdict(difference)}

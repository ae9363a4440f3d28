"""Report of launch.distill, on the console and in distill.json."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from launch.acceptance.counts import DraftCounts
from launch.acceptance.held_out import HeldOutAcceptance
from launch.distillation.trainer import Distillation


def distillation_json(result: Distillation, acceptance: Sequence[HeldOutAcceptance]) -> dict[str, Any]:
    """Return the content of distill.json. The first entry of `acceptance` is at the run's temperature."""
    return {
        "vocabulary": vocabulary(result),
        "cost": asdict(result.cost),
        "acceptance": [at_temperature.to_json() for at_temperature in acceptance],
    }


def vocabulary(result: Distillation) -> dict[str, Any] | None:
    """Return the size of a reduced draft vocabulary and its coverage, the fraction of answer tokens in it.

    Returns None if the draft has the policy's vocabulary.
    """
    ids = getattr(result.drafter, "target_ids", None)
    if ids is None:
        return None
    return {"size": len(ids), "coverage": float(np.isin(result.answers.completions, ids).mean())}


def print_distillation(result: Distillation, acceptance: Sequence[HeldOutAcceptance], console: Console) -> None:
    """Print acceptance by temperature and by answer length, and the cost."""
    run_acceptance, cost = acceptance[0], result.cost
    title = (
        f"held-out prompts at draft length {run_acceptance.draft_length}: acceptance length (alpha) and acceptance "
        "rate of each position"
    )
    table = _table("temperature", title, run_acceptance.counts)
    for at_temperature in acceptance:
        row = _row(at_temperature.counts)
        table.add_row(f"{at_temperature.temperature:g}", *row, _show(at_temperature.predicted))
    console.print(table)
    title = f"by answer length, at temperature {run_acceptance.temperature:g}"
    table = _table("tokens", title, run_acceptance.counts)
    for length, counts in run_acceptance.by_length.items():
        table.add_row(f"<= {length}", *_row(counts), "")
    console.print(table)
    before, after = _show(run_acceptance.untrained), _show(run_acceptance.predicted)
    console.print(f"predicted acceptance of position 1: {before} before training, {after} after")
    if (reduced := vocabulary(result)) is not None:
        console.print(
            f"draft vocabulary: {reduced['size']} tokens cover {reduced['coverage']:.2%} of the answer tokens"
        )
    console.print(
        f"cost: {cost.generation_s:.1f} s to generate {cost.answers} answers ({cost.answer_tokens} tokens), "
        f"{cost.training_s:.1f} s for {cost.steps} training steps ({cost.trained_tokens} tokens); "
        f"{cost.compile_s:.1f} s of this was compilation"
    )
    console.print("launch.compare, with the draft as --draft.path, measures what it saves in each step")


def _table(key_column: str, title: str, counts: DraftCounts) -> Table:
    positions = (f"pos {i + 1}" for i in range(len(counts.drafted)))
    names = (key_column, "sequences", "alpha", *positions, "predicted pos 1")
    columns = (Column(name, justify="right", no_wrap=True) for name in names)
    return Table(*columns, box=None, padding=(0, 0, 0, 2), title=title, title_justify="left")


def _row(counts: DraftCounts) -> tuple[str, ...]:
    return str(counts.sequences), _show(counts.alpha, ".2f"), *map(_show, counts.rates)


def _show(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else f"{value:{form}}"

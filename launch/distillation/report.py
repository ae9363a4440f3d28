"""The report of launch.distill: on the console, and in distill.json."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from launch.distillation.acceptance import DraftCounts, HeldOutAcceptance
from launch.distillation.break_even import BreakEven
from launch.distillation.trainer import Distillation


def distillation_json(
    result: Distillation, acceptance: Sequence[HeldOutAcceptance], break_even: Sequence[BreakEven]
) -> dict[str, Any]:
    """Return what distill.json holds; the first of `acceptance` is at the run's own temperature."""
    return {
        "vocabulary": vocabulary(result),
        "cost": asdict(result.cost),
        "acceptance": [each.to_json() for each in acceptance],
        "payback": asdict(_best(break_even)) | {"by_length": [asdict(each) for each in break_even]},
    }


def vocabulary(result: Distillation) -> dict[str, Any] | None:
    """Return the size of a reduced draft vocabulary and the share of the answers' tokens in it; None if it is full."""
    ids = getattr(result.drafter, "target_ids", None)
    if ids is None:
        return None
    return {"size": len(ids), "coverage": float(np.isin(result.answers.completions, ids).mean())}


def print_distillation(
    result: Distillation, acceptance: Sequence[HeldOutAcceptance], break_even: Sequence[BreakEven], console: Console
) -> None:
    """Print tables of acceptance, the cost, and when that is paid for."""
    own, cost = acceptance[0], result.cost
    title = f"held-out prompts at draft length {own.draft_length}: tokens a round (alpha), acceptance of each position"
    table = _table("temperature", title, own.counts)
    for each in acceptance:
        table.add_row(f"{each.temperature:g}", *_row(each.counts), _show(each.predicted))
    console.print(table)
    table = _table("tokens", f"the same by the length of the answer, at temperature {own.temperature:g}", own.counts)
    for length, counts in own.by_length.items():
        table.add_row(f"<= {length}", *_row(counts), "")
    console.print(table)
    console.print(f"predicted acceptance of position 1: {_show(own.untrained)} untrained, {_show(own.predicted)} now")
    if (chosen := vocabulary(result)) is not None:
        console.print(f"draft vocabulary: {chosen['size']} tokens, {chosen['coverage']:.2%} of the answers'")
    console.print(
        f"cost: {cost.generation_s:.1f} s for {cost.answers} answers of {cost.answer_tokens} tokens, "
        f"{cost.training_s:.1f} s for {cost.steps} steps over {cost.trained_tokens} tokens; "
        f"{cost.compile_s:.1f} s of both were compiling"
    )
    console.print(_best(break_even).describe())
    if len(break_even) > 1:
        each = ", ".join(f"{at_length.draft_length}: {at_length.saved_s:.3g} s" for at_length in break_even)
        console.print(f"the best draft length of these, by what it saves: {each}")


def _best(break_even: Sequence[BreakEven]) -> BreakEven:
    """Return the draft length that saves most."""
    return max(break_even, key=lambda at_length: at_length.saved_s)


def _table(first: str, title: str, counts: DraftCounts) -> Table:
    positions = (f"pos {i + 1}" for i in range(len(counts.drafted)))
    names = (first, "sequences", "alpha", *positions, "predicted pos 1")
    columns = (Column(name, justify="right", no_wrap=True) for name in names)
    return Table(*columns, box=None, padding=(0, 0, 0, 2), title=title, title_justify="left")


def _row(counts: DraftCounts) -> tuple[str, ...]:
    return str(counts.sequences), _show(counts.alpha, ".2f"), *map(_show, counts.rates)


def _show(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else f"{value:{form}}"

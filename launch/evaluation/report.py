"""Evaluation results of a set of problems, as a table and as JSON."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Column, Table

from launch.data.problems import Problem
from launch.evaluation.sampler import Sampled
from launch.evaluation.statistics import INTERVAL, Estimate, majority_at_k, over_prompts, pass_at_k


@dataclass(frozen=True)
class SetReport:
    """Evaluation results of one set of problems.

    Attributes:
        name:              the set's name or file.
        prompts:           number of prompts.
        questions:         number of different questions among them, which the measures are means of.
        samples:           completions per prompt.
        measures:          estimates by name: `accuracy`, `pass@k`, `majority@k`.
        unscored:          number of completions that could not be scored; they count as wrong.
        length_mean:       mean completion length in tokens, without observed ones.
        truncated:         fraction of completions cut off at the length budget.
        acceptance_length: tokens per verification; None if nothing was verified.
        tokens_per_s:      tokens per second of generation, without compilation.
    """

    name: str
    prompts: int
    questions: int
    samples: int
    measures: dict[str, Estimate]
    unscored: int
    length_mean: float
    truncated: float
    acceptance_length: float | None
    tokens_per_s: float

    def to_json(self) -> dict[str, Any]:
        """Return all fields, with each measure as {value, low, high}."""
        return asdict(self) | {"measures": {name: measure._asdict() for name, measure in self.measures.items()}}


def set_report(
    name: str,
    problems: Sequence[Problem],
    parts: Sequence[Sampled],
    samples: int,
    counts: Sequence[int],
    final_answer: Callable[[Sequence[int], int], str | None] | None,
) -> SetReport:
    """Return the results of a set.

    problems:     problems of the set; the ids of `parts` index them.
    parts:        batches of sampled completions of the set.
    counts:       values of k above 1, for pass@k and majority@k.
    final_answer: (token ids, id) -> the completion's final answer; None: no majority@k.
    """
    ids, correct, value, stopped = (
        np.concatenate([getattr(part, field) for part in parts]) for field in ("ids", "correct", "value", "stopped")
    )
    # Tokens that the policy drew.
    lengths = np.concatenate([part.drawn().sum(axis=1) for part in parts])
    questions = [problems[number].question for number in ids[::samples]]
    correct = correct.reshape(-1, samples)
    measures = {"accuracy": over_prompts(correct.mean(axis=1), questions)}
    measures |= {f"pass@{k}": over_prompts(pass_at_k(correct, k), questions) for k in counts}
    if final_answer is not None and counts:
        row_answers = [answer for part in parts for answer in _answers(part, final_answer)]
        answers = [row_answers[start : start + samples] for start in range(0, len(row_answers), samples)]
        measures |= {f"majority@{k}": over_prompts(majority_at_k(answers, correct, k), questions) for k in counts}
    rounds = sum(int(part.rounds.sum()) for part in parts)
    return SetReport(
        name=name,
        prompts=len(correct),
        questions=len(set(questions)),
        samples=samples,
        measures=measures,
        unscored=int(np.sum(~np.isfinite(value))),
        length_mean=float(lengths.mean()),
        truncated=float(np.mean(~stopped)),
        acceptance_length=float(lengths.sum() - len(lengths)) / rounds if rounds else None,
        tokens_per_s=int(lengths.sum()) / sum(part.seconds for part in parts),
    )


def print_set(result: SetReport, draft_length: int, console: Console) -> None:
    """Print the set's measures with their intervals, then lengths, acceptance length and speed."""
    columns = Column(result.name), Column("", justify="right"), Column("95% interval", justify="right")
    table = Table(*columns, box=None, padding=(0, 2, 0, 0))
    for name, (value, low, high) in result.measures.items():
        table.add_row(name, f"{value:.1%}", f"{low:.1%} .. {high:.1%}")
    console.print(table)
    completions = result.prompts * result.samples
    repeats = f" of {result.questions} different questions" if result.questions < result.prompts else ""
    console.print(f"{result.prompts} prompts{repeats}, {result.samples} completions each; {INTERVAL}")
    if result.unscored:
        console.print(f"{result.unscored} of {completions} completions could not be scored and count as wrong")
    acceptance_length = "-" if result.acceptance_length is None else f"{result.acceptance_length:.2f}"
    console.print(
        f"mean length {result.length_mean:.1f} tokens, {result.truncated:.1%} cut off at the length budget; "
        f"acceptance length {acceptance_length} at draft length {draft_length}, {result.tokens_per_s:.0f} tokens/s"
    )


def _answers(part: Sampled, final_answer: Callable[[Sequence[int], int], str | None]) -> list[str | None]:
    """Return the final answer of each scored wrong completion, None for the others.

    `majority_at_k` counts all correct completions as one answer, so it does not need their text.
    """
    rows = zip(part.ids.tolist(), part.tokens, part.drawn(), part.correct, np.isfinite(part.value), strict=True)
    return [
        final_answer(tokens[drawn].tolist(), problem) if scored and not correct else None
        for problem, tokens, drawn, correct, scored in rows
    ]

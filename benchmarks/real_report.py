"""The report of benchmarks.real, from what its stages printed and wrote."""

import json
import re
from pathlib import Path
from typing import Any

from launch.timing import format_provenance

# Lines of progress, which a report does without.
PROGRESS = re.compile(r".*: \d+ of \d+ [\w ]+(,.*|( \.\.|; compiling \.\.))?")
SHOWN = 6  # answers shown before and after training


def stage_seconds(out: Path) -> dict[str, Any]:
    """Return a list by stage: its seconds over all processes that worked on it, if it is finished, and its command."""
    path = out / "stages.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def report(out: Path, source: str, names: list[str]) -> str:
    """Return the text of the report: where it was measured, what each stage printed, and some answers."""
    seconds = {name: spent for name, (spent, *_) in stage_seconds(out).items()}
    parts = [
        format_provenance("benchmarks.real"),
        f"model     {source}",
        f"minutes   {', '.join(f'{name} {seconds[name] / 60:.1f}' for name in names)}; "
        f"together {sum(seconds.values()) / 60:.1f}, without fetching the model",
        *accuracies(out),
    ]
    for name in names:
        printed = (out / f"{name}.txt").read_text(encoding="utf-8").splitlines()
        parts += ["", f"-- {name}", *(line.rstrip() for line in printed if not PROGRESS.fullmatch(line))]
    return "\n".join([*parts, "", *answers(out)]) + "\n"


def measured(out: Path, name: str) -> dict[str, Any]:
    """Return what an evaluation measured, and as `text` its accuracy with the 95% interval."""
    (found,) = json.loads((out / f"{name}.json").read_text(encoding="utf-8"))["sets"]
    return found | {"text": "{value:.1%} [{low:.1%}, {high:.1%}]".format(**found["measures"]["accuracy"])}


def accuracies(out: Path) -> list[str]:
    """Return lines with accuracy and acceptance length on held-out prompts: of the first half, and of the second."""
    before, after, taught = (measured(out, name) for name in ("before", "after", "taught"))
    texts = [
        f"{each['text']} {name} training at acceptance length {each['acceptance_length']:.2f}"
        for name, each in (("before", before), ("after", after))
    ]
    return [
        f"accuracy  {', '.join(texts)}; {after['prompts']} held-out prompts",
        f"taught    {taught['text']} without rewards, from the same start; its teacher {after['text']}",
    ]


def answers(out: Path) -> list[str]:
    """Return lines with the first held-out answers before and after training, each with its reward."""
    lines = []
    for name in ("before", "after"):
        lines.append(f"-- the first answers {name} training, with their rewards")
        with (out / f"{name}.jsonl").open(encoding="utf-8") as records:
            for record in (json.loads(line) for line, _ in zip(records, range(SHOWN), strict=False)):
                lines.append(f"{record['reward']:<5.3g}  {json.dumps(record['completion'], ensure_ascii=False)}")
    return lines

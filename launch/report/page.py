"""The report of a run: an HTML page that holds the run's data, and a script that draws them."""

import importlib.resources
import json
import os
from collections import Counter
from html import escape
from pathlib import Path
from typing import Any

from configs.override import flat
from launch.console import console
from launch.environments.parts import ENDINGS
from launch.phases.run_clock import describe_seconds
from launch.report.charts import length_bars, line_charts, metric_series, stage_bars
from launch.report.figures import key_figures, number, run_times
from launch.report.warnings import warnings
from launch.run.history import matches_schema
from launch.run.records import RunRecords, read_run
from models.files import write_atomically
from specjax.parallel import processes
from specjax.types import Writer

REPORT_FILE = "report.html"
# In a clone. The page names them where they are absent, as beside installed packages.
DOCS = Path(__file__).parents[2] / "docs"
WRITERS = {
    Writer.POLICY: "policy, without a draft (the first token, and all at draft length 0)",
    Writer.DRAFT: "draft, accepted",
    Writer.RECOVERED: "policy, instead of a rejected token",
    Writer.BONUS: "policy, bonus token after a fully accepted proposal",
    Writer.ENVIRONMENT: "environment, observed: trains nothing",
}
# Tokens shown at the start and at the end of a long completion.
HEAD, TAIL = 400, 100
# Largest number of steps whose completions are shown.
MOST = 8
PAGE = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    '<meta name="color-scheme" content="light dark"><title>{title}</title><style>{style}</style>'
    "<main><noscript>{text}<p>JavaScript draws the charts and completions.</p></noscript></main>"
    '<script type="application/json" id="data">{data}</script><script>{script}</script></html>\n'
)


def write_report(directory: Path) -> Path:
    """Write report.html into the directory of a finished or unfinished run. Return its path.

    Raises ConfigError if the directory is not a run directory.
    """
    path, run = directory / REPORT_FILE, read_run(directory)
    style, script = (
        importlib.resources.files("launch.report").joinpath(name).read_text(encoding="utf-8")
        for name in ("style.css", "script.js")
    )
    # "<" could end the element that holds the data.
    explained = (DOCS / "troubleshooting.md").is_file()
    data = report_data(run, directory) | {"docs": os.path.relpath(DOCS, directory) if explained else None}
    encoded = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    page = PAGE.format(title=escape(run.name), style=style, text=_as_text(data), script=script, data=encoded)
    # The name may hold half of a surrogate pair, which UTF-8 cannot encode.
    write_atomically(path, page.encode("utf-8", "replace"))
    return path


def try_report(directory: Path) -> None:
    """Write report.html and print its path. Never raises, so that a failed run shows its original error."""
    if not processes.primary():
        return
    try:
        console.print(f"report: {write_report(directory)}")
    except Exception as error:
        console.print(f"report.html not written: {type(error).__name__}: {error}")


def report_data(run: RunRecords, directory: Path) -> dict[str, Any]:
    """Return what script.js draws, as JSON."""
    metrics, samples = metric_series(run), _samples(run)
    return {
        "name": run.name,
        "about": _about(run),
        "figures": list(key_figures(run)),
        "warnings": warnings(run, directory),
        # Charts of what was measured before the first step begin at step 0, the others at the first step.
        "span": [int(max(run.steps[0], 1)), int(max(run.steps[-1], 1))] if len(run.steps) else None,
        "metrics": metrics,
        "sections": line_charts(metrics),
        "stages": stage_bars(run),
        "lengths": length_bars(run),
        "writers": _legend(samples),
        "samples": samples,
        "config": [[name, _text(value)] for name, value in flat(run.config).items()],
    }


def _as_text(data: dict[str, Any]) -> str:
    """Return what the run is, its key figures and its warnings as HTML, for readers without JavaScript."""
    figures = (f"{value} {label}" for value, label in data["figures"])
    lines = [*data["about"], *figures, *(f"warning at {line}" for line, _ in data["warnings"])]
    return f"<h1>{escape(data['name'])}</h1>" + "".join(f"<p>{escape(line)}</p>" for line in lines)


def _about(run: RunRecords) -> list[str]:
    starts = run.events_of("start")
    lines = [f"recipe {run.config.get('name')}, seed {run.config.get('seed')}"]
    if starts:
        first = starts[0][1]
        lines.append(f"{first['date'].replace('T', ' ')} on {first['device']} ({first['host']})")
        lines.append(", ".join(f"{name} {version}" for name, version in first["versions"].items()))
    for _, summary in run.events_of("summary")[-1:]:
        lines += summary
    if (times := run_times(run)) is not None:
        lines.append(describe_seconds(times))
    if len(starts) > 1:
        lines.append("resumed after step " + ", ".join(str(step) for step, _ in starts[1:]))
    return lines


def _samples(run: RunRecords) -> list[list[Any]]:
    """Return the completions of at most MOST steps, newest first: the first, the last, evenly spaced ones between."""
    logged = [sample for sample in run.samples if sample["completions"]]
    count = min(len(logged), MOST)
    selection = [logged[round(i * (len(logged) - 1) / max(count - 1, 1))] for i in reversed(range(count))]
    samples = []
    for sample in selection:
        writers = Counter(writer for completion in sample["completions"] for _, writer in completion["pieces"])
        from_draft = writers[Writer.DRAFT] / max(sum(writers.values()) - writers[Writer.ENVIRONMENT], 1)
        title = f"{from_draft:.0%} of these tokens written by the draft"
        samples.append([f"step {sample['step']}", title, list(map(_completion, sample["completions"]))])
    return samples


def _legend(samples: list[list[Any]]) -> list[tuple[int, str]]:
    """Return (writer, text) of each shade; that of observed tokens only if there are any."""
    shown = (
        piece for _, _, each in samples for completion in each for piece in completion["head"] + completion["tail"]
    )
    observed = any(writer == Writer.ENVIRONMENT for _, writer in shown)
    return [(writer, text) for writer, text in WRITERS.items() if observed or writer != Writer.ENVIRONMENT]


def _completion(completion: dict[str, Any]) -> dict[str, Any]:
    """Return a completion with its facts as texts. The middle of a long one is cut out: `hidden` tokens."""
    pieces, reward, ending = completion["pieces"], completion["reward"], completion.get("ending")
    hidden = max(len(pieces) - HEAD - TAIL, 0)
    observed = sum(writer == Writer.ENVIRONMENT for _, writer in pieces)
    facts = [f"{len(pieces)} tokens" + f", {observed} observed" * (observed > 0), f"expected {completion['answer']}"]
    if isinstance(extracted := completion.get("extracted"), str):
        facts.append(f"extracted {extracted}")
    facts.append("not scored" if reward is None else f"reward {number(reward)}")
    if matches_schema(advantage := completion.get("advantage"), int | float):
        facts.append(f"advantage {advantage:+.2f}")
    if (given := completion.get("environment_reward")) is not None and matches_schema(given, int | float):
        facts.append(f"{number(given)} from the environment")
    if matches_schema(turns := completion.get("turns"), int):
        facts.append(f"{turns} turn{'s' * (turns != 1)}")
    if completion["stopped"] is False or isinstance(ending, str):
        facts.append(ENDINGS.get(str(ending), ENDINGS["length"]))
    return {
        "prompt": completion["prompt"],
        "facts": facts,
        "head": pieces[:HEAD] if hidden else pieces,
        "hidden": hidden,
        "tail": pieces[-TAIL:] if hidden else [],
        "stopped": completion["stopped"],
    }


def _text(value: Any) -> str:
    return "none" if value is None else " ".join(map(str, value)) if isinstance(value, list) else str(value)

"""Charts of a run, as data that script.js draws.

charts.json lists the line charts. In each, `metrics` has the label of each line by metric: a regular expression of the
whole name, and a label that may hold its groups. `zero` (true unless given) includes 0 in the y axis, `percent` shows
values as percentages, `dashed` names lines that are bounds or predictions, `reference` is a level to draw, and an
`optional` chart is left out if its values are all 0.
"""

import importlib.resources
import json
import re
from typing import Any

import numpy as np

from launch.report.series import LARGEST, series
from launch.run.metric_log import STANDARD_METRICS
from launch.run.records import RunRecords

Chart = dict[str, Any]
CHARTS = importlib.resources.files("launch.report") / "charts.json"
BARS = 24  # at most
# Stages of a probe step, in order, and their colors. They sum to time/step.
STAGES = {"data": 6, "prepare": 4, "generation": 1, "reward": 5, "logprob": 3, "train": 2}


def metric_series(run: RunRecords) -> dict[str, Chart]:
    """Return the series of each metric that has values, and of `tokens_per_s`, the speed of whole steps."""
    unknown = np.full(len(run.steps), np.nan)
    tokens, seconds = (run.metrics.get(name, unknown) for name in ("rollout/tokens", "time/step"))
    speed = np.divide(tokens, seconds, out=unknown.copy(), where=seconds > 0)
    accuracy = run.metrics.get("eval/accuracy", unknown).copy()
    for step, result in run.events_of("result"):
        # Measured at the end, after the last step has its line.
        if (value := result.get("accuracy_after")) is not None:
            accuracy[run.steps == step] = value
    metrics = run.metrics | {"tokens_per_s": speed, "eval/accuracy": accuracy}
    measured = {name: np.isfinite(values) for name, values in metrics.items()}
    return {name: series(run.steps[at], metrics[name][at]) for name, at in measured.items() if at.any()}


def line_charts(metrics: dict[str, Chart]) -> dict[str, list[Chart]]:
    """Return the line charts by section: all of charts.json, and one for each metric that charts.json leaves out.

    `lines` of each is [[metric, label], ..]. Charts without a metric are left out.
    """
    sections: dict[str, list[Chart]] = json.loads(CHARTS.read_text("utf-8"))
    names, charted = sorted(metrics, key=len), set(STANDARD_METRICS)  # position 10 after position 9
    for charts in sections.values():
        for chart in charts:
            patterns = chart.pop("metrics").items()
            matches = [(re.fullmatch(pattern, name), label) for pattern, label in patterns for name in names]
            chart["lines"] = [(match[0], match.expand(label)) for match, label in matches if match]
            charted |= {name for name, _ in chart["lines"]}
    # Metrics of a custom loss or drafter.
    uncharted = [name for name in metrics if name not in charted and not name.startswith("reward/")]
    sections["Other metrics"] = [
        {"title": name, "lines": [(name, name.rpartition("/")[2])], "zero": False} for name in uncharted
    ]
    return {title: [chart for chart in charts if chart["lines"]] for title, charts in sections.items()}


def stage_bars(run: RunRecords) -> list[Chart]:
    """Return a chart of the seconds of each stage, one stacked bar per probe step; none without probes.

    The `boxes` of a series are [left, right, bottom, top, text]. Bars of many steps are averaged in groups.
    """
    measured = {name: run.metrics[f"time/{name}"] for name in STAGES if f"time/{name}" in run.metrics}
    seconds = {name: np.nan_to_num(values).clip(0, LARGEST) for name, values in measured.items()}
    probed = np.flatnonzero(np.isfinite(run.metrics.get("time/generation", np.zeros(0))))
    if not len(probed):
        return []
    groups = np.array_split(probed, min(len(probed), BARS))
    labels = ["step " + " to ".join(dict.fromkeys(str(run.steps[i]) for i in group[[0, -1]])) for group in groups]
    total, bottom, parts = sum(values[probed].mean() for values in seconds.values()), np.zeros(len(groups)), []
    for name, values in seconds.items():
        top = bottom + [values[group].mean() for group in groups]
        boxes = [
            [i + 0.14, i + 0.86, bottom[i], top[i], f"{label}: {name} {top[i] - bottom[i]:.4g} s"]
            for i, label in enumerate(labels)
        ]
        mean, bottom = values[probed].mean(), top
        share = f"{mean:.3f} s, {mean / (total or 1):.1%}"
        parts.append({"label": name, "value": share, "color": STAGES[name], "boxes": boxes})
    x = [(i + 0.5, str(run.steps[group[0]])) for i, group in enumerate(groups)][:: -(-len(groups) // 6)]
    hint = f"seconds, at probe steps; their mean is {total:.3f} s"
    return [{"title": "Stages of a step", "hint": hint, "series": parts, "span": (0, max(len(groups), 8)), "x": x}]


def length_bars(run: RunRecords) -> list[Chart]:
    """Return a histogram of the completion lengths of the first and the last sampled step; none without samples."""
    samples = [sample for sample in run.samples if sample["lengths"]]
    if not samples:
        return []
    budget = max(sample["budget"] for sample in samples)
    first_and_last = [samples[0], samples[-1]][: len(samples)]
    edges = np.linspace(0, budget + 1, min(budget + 1, BARS) + 1)
    parts, width = [], 0.84 * edges[1] / len(first_and_last)
    for i, sample in enumerate(first_and_last):
        lengths, label, boxes = np.array(sample["lengths"]), f"step {sample['step']}", []
        for edge, count in zip(edges, np.histogram(lengths, edges)[0], strict=False):
            low, high = int(np.ceil(edge)), int(np.ceil(edge + edges[1])) - 1
            left, share = edge + 0.08 * edges[1] + i * width, count / len(lengths)
            boxes.append([left, left + width, 0, share, f"{label}: {share:.1%} of {low} to {high} tokens"])
        color = (6, 1)[i - len(first_and_last)]
        parts.append({"label": label, "value": f"mean {lengths.mean():.4g}", "color": color, "boxes": boxes})
    hint = f"in tokens; the last bar holds completions at the budget of {budget}"
    title = "Completion length distribution"
    return [{"title": title, "hint": hint, "series": parts, "span": (0, budget + 1), "percent": True}]

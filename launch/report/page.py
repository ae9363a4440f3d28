"""The page of the report: its parts, in their order."""

import importlib.resources
import re
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from launch.cli.console import console
from launch.report.charts import bar_chart, histogram, line_chart
from launch.report.completions import completions
from launch.report.scales import duration, number
from launch.report.series import Series
from launch.report.warnings import warnings
from launch.run.metric_log import STANDARD_METRICS
from launch.run.records import Run, read_run
from models.files import write_atomically

REPORT_FILE = "report.html"
# Of the palette.
COLORS = 6
POSITION = re.compile(r"rollout/acceptance_rate_pos_(\d+)")
# Of probe steps; they sum to time/step.
STAGES = {"data": 6, "prepare": 4, "generation": 1, "reward": 5, "logprob": 3, "train": 2}


def write_report(directory: Path) -> Path:
    """Write report.html into the directory of a run, finished or not, and return where it is.

    Raises ConfigError where the directory is not that of a run.
    """
    path = directory / REPORT_FILE
    write_atomically(path, page(read_run(directory)))
    return path


def try_report(directory: Path) -> None:
    """Write report.html and say where it is. Never raise, so that the error of a run that failed is not masked."""
    try:
        console.print(f"report: {write_report(directory)}")
    except Exception as error:
        console.print(f"no report: {type(error).__name__}: {error}")


def page(run: Run) -> str:
    """Return the whole report as HTML."""
    parts = [
        ("", _head(run)),
        ("Learning", _charts(*_learning(run))),
        ("Speculative decoding", _charts(*_drafting(run))),
        ("Optimisation", _charts(*_optimisation(run))),
        ("Time", _charts(*_time(run))),
        ("Other metrics", _charts(*_others(run))),
        ("Completions", _charts(*_lengths(run)) + _space(completions(run.samples))),
        ("Configuration", _config(run)),
    ]
    body = "".join((f"<h2>{title}</h2>" if title else "") + content for title, content in parts if content)
    style, script = (_resource(name) for name in ("style.css", "script.js"))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(run.name)}</title><style>{style}</style>'
        f"<main>{body}</main><script>{script}</script></html>\n"
    )


def _resource(name: str) -> str:
    return importlib.resources.files("launch.report").joinpath(name).read_text(encoding="utf-8")


def _head(run: Run) -> str:
    starts = run.events_of("start")
    lines = [f"recipe {escape(str(run.config.get('name')))}, seed {run.config.get('seed')}"]
    if starts:
        first = starts[0][1]
        versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
        begun = first["date"].replace("T", " ")
        lines.append(f"{escape(begun)} on {escape(first['device'])} ({escape(first['host'])})")
        lines.append(escape(versions))
    if len(starts) > 1:
        lines.append("resumed after step " + ", ".join(str(step) for step, _ in starts[1:]))
    said = "".join(f'<p class="soft">{line}</p>' for line in lines)
    tiles = "".join(f'<div class="tile"><b>{value}</b><span>{label}</span></div>' for label, value in _numbers(run))
    alarms = "".join(f"<li>{escape(line)}</li>" for line in warnings(run))
    box = f'<div class="warnings"><b>Warnings</b><ul>{alarms}</ul></div>' if alarms else ""
    return f'<h1>{escape(run.name)}</h1>{said}<div class="tiles">{tiles}</div>{box}'


def _numbers(run: Run) -> Iterator[tuple[str, str]]:
    """Return (label, value) of the run's results."""
    done = int(run.steps[-1]) if len(run.steps) else 0
    yield f"of {run.config.get('steps')} steps done", str(done)
    result = {name: value for _, values in run.events_of("result") for name, value in values.items()}
    if "accuracy_after" in result:
        yield f"held-out accuracy, {result['accuracy_before']:.1%} before RL", f"{result['accuracy_after']:.1%}"
    elif len(held_out := run.measured("eval/accuracy")[1]):
        yield "held-out accuracy, last", f"{held_out[-1]:.1%}"
    for metric, label, percent in (
        ("reward/accuracy", "training accuracy, last tenth", True),
        ("reward/mean", "reward, last tenth", False),
        ("rollout/acceptance_length", "tokens a round, last tenth", False),
    ):
        values = run.measured(metric)[1]
        if len(values):
            yield label, number(float(values[-max(len(values) // 10, 1) :].mean()), percent)
    if "speedup" in result:
        yield "speed-up of generation, best plans at the end", f"{result['speedup']:.2f}x"
    elif len(speedups := run.measured("perf/speedup_vs_autoregressive")[1]):
        yield "speed-up of generation, last probe", f"{speedups[-1]:.2f}x"
    for metric, label, show in (
        ("rollout/tokens", "tokens generated", number),
        ("time/step", "in steps", duration),
    ):
        values = run.measured(metric)[1]
        if len(values):
            yield label, show(float(values.sum()))


def _learning(run: Run) -> Iterator[str]:
    yield _lines(run, "Reward", {"reward/mean": "mean"}, hint="of all completions that were scored")
    whole = {f"reward/{name}" for name in ("mean", "std", "accuracy", "failed", "overlong")}
    parts = {name: name.removeprefix("reward/") for name in run.metrics if name.startswith("reward/")}
    parts = {name: label for name, label in parts.items() if name not in whole}
    if parts:
        yield _lines(run, "Parts of the reward", parts, hint="before their weights", zero=True)
    if run.measured("reward/overlong")[1].any():
        yield _lines(run, "What length costs", {"reward/overlong": "mean"}, hint="beside the reward", zero=True)
    accuracy = [_series(run, "reward/accuracy", "training", 1), _series(run, "eval/accuracy", "held out", 2)]
    yield line_chart("Accuracy", accuracy, percent=True, zero=True, span=_span(run))
    yield _lines(run, "Completion length", {"rollout/length_mean": "mean", "rollout/length_max": "longest"}, zero=True)
    yield _lines(
        run,
        "Truncated",
        {"rollout/truncated": "share of completions"},
        hint="cut at the length budget",
        percent=True,
        zero=True,
    )
    yield _lines(
        run,
        "Groups that teach nothing",
        {"groups/zero_variance": "groups"},
        hint="all of whose samples have the same reward",
        zero=True,
    )
    left_out = {"groups/sequences_trained": "trained on", "rollout/empty": "empty"}
    yield _lines(run, "Sequences of a step", left_out, hint="empty: nothing before the stop", zero=True)


def _drafting(run: Run) -> Iterator[str]:
    yield _lines(
        run,
        "Tokens a round",
        {"rollout/acceptance_length": "emitted", "rollout/draft_length": "drafted"},
        hint="acceptance length: accepted tokens and the one after them",
        zero=True,
    )
    positions = sorted(int(match[1]) for name in run.metrics if (match := POSITION.fullmatch(name)))
    rates = {f"rollout/acceptance_rate_pos_{i}": f"position {i}" for i in positions}
    yield _lines(run, "Acceptance by position", rates, hint="of the drafts that had it", percent=True, zero=True)
    acceptance = [
        _series(run, "draft/measured_acceptance", "measured", 1),
        _series(run, "draft/promised_acceptance", "promised at least", 2, dashed=True),
        _series(run, "draft/predicted_acceptance", "predicted, all tokens", 6, dashed=True),
    ]
    hint = "of position 1 in the rollout, against what training makes of the same tokens"
    yield line_chart("Acceptance kept", acceptance, hint=hint, percent=True, zero=True, span=_span(run))
    yield _lines(
        run,
        "Speed-up of generation",
        {"perf/speedup_vs_autoregressive": "speed-up"},
        hint="over draft length 0, at probes",
        zero=True,
        reference=1.0,
    )
    yield _lines(
        run,
        "Rollout against training",
        {"rollout/logprob_gap_mean": "mean"},
        hint="gap of the log-probs of the same tokens",
        zero=True,
    )


def _optimisation(run: Run) -> Iterator[str]:
    yield _lines(run, "Policy loss", {"loss/policy": "loss"})
    yield _lines(run, "Draft loss", {"loss/draft": "loss"}, zero=True)
    yield _lines(run, "Entropy", {"entropy": "nats a token"}, zero=True)
    yield _lines(run, "KL to the reference", {"kl/reference": "nats a token"}, zero=True)
    norms = {"grad_norm/policy": "policy", "grad_norm/draft": "draft"}
    yield _lines(run, "Gradient norms", norms, hint="before clipping", zero=True)
    yield _lines(run, "Clipped", {"loss/clip_fraction": "share of tokens"}, percent=True, zero=True)
    yield _lines(run, "Ratio", {"ratio/max": "largest"}, hint="of policy to rollout, of a token")


def _time(run: Run) -> Iterator[str]:
    steps, total = run.measured("time/generation")
    if len(steps):
        at = np.isin(run.steps, steps)
        parts = {
            name: (color, np.nan_to_num(run.metrics[f"time/{name}"][at]))
            for name, color in STAGES.items()
            if f"time/{name}" in run.metrics
        }
        yield bar_chart("Stages of a step", steps, parts, hint="seconds, at probe steps")
        yield _stage_table(parts)
    yield _lines(run, "Time of a step", {"time/step": "seconds"}, hint="the first one compiles", zero=True)
    tokens, seconds = run.metrics.get("rollout/tokens"), run.metrics.get("time/step")
    if tokens is not None and seconds is not None:
        speed = tokens / seconds
        found = np.isfinite(speed)
        series = [
            Series("whole step", run.steps[found], speed[found], 2),
            _series(run, "perf/generation_tokens_per_s", "generation alone, at probes", 1),
        ]
        yield line_chart("Tokens a second", series, zero=True, span=_span(run))


def _others(run: Run) -> Iterator[str]:
    """Yield a chart for each metric with a name of its own, such as those of a custom loss or drafter."""
    for name in run.metrics:
        if name not in STANDARD_METRICS and not name.startswith("reward/") and not POSITION.fullmatch(name):
            yield _lines(run, name, {name: name.rpartition("/")[2]})


def _stage_table(parts: dict[str, tuple[int, np.ndarray]]) -> str:
    means = {name: float(values.mean()) for name, (_, values) in parts.items()}
    whole = sum(means.values())
    rows = "".join(
        f'<tr><td><i class="b{parts[name][0]}"></i>{name}</td><td>{mean:.3f}</td><td>{mean / whole:.1%}</td></tr>'
        for name, mean in means.items()
    )
    return (
        '<figure class="chart"><figcaption>Stages of a step<small>mean of all probe steps</small></figcaption>'
        f"<table><tr><th>stage</th><th>seconds</th><th>share</th></tr>{rows}"
        f"<tr><td>all</td><td>{whole:.3f}</td><td></td></tr></table></figure>"
    )


def _lengths(run: Run) -> Iterator[str]:
    if run.samples:
        budget = max(sample["budget"] for sample in run.samples)
        picked = run.samples[:1] if len(run.samples) == 1 else [run.samples[0], run.samples[-1]]
        groups = {
            f"step {sample['step']}": (color, np.array(sample["lengths"]))
            for sample, color in zip(picked, (6, 1) if len(picked) > 1 else (1,), strict=True)
        }
        hint = f"in tokens, of at most {budget}; the last bar has those at the budget"
        yield histogram("Lengths of completions", groups, budget, hint=hint)


def _config(run: Run) -> str:
    rows = "".join(f"<div><span>{escape(name)}</span><b>{escape(value)}</b></div>" for name, value in _flat(run.config))
    return f'<details><summary>config.json</summary><div class="config">{rows}</div></details>'


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else key)
    else:
        yield name, "none" if value is None else " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _lines(run: Run, title: str, metrics: dict[str, str], **options: Any) -> str:
    # A line beyond the colors is dashed, and has that of an earlier one.
    styles = ((i % COLORS + 1, i >= COLORS) for i in range(len(metrics)))
    series = [_series(run, name, label, *style) for (name, label), style in zip(metrics.items(), styles, strict=True)]
    return line_chart(title, series, span=_span(run), **options)


def _series(run: Run, metric: str, label: str, color: int, dashed: bool = False) -> Series:
    return Series(label, *run.measured(metric), color, dashed)


def _span(run: Run) -> tuple[int, int] | None:
    return (int(run.steps[0]), int(run.steps[-1])) if len(run.steps) else None


def _charts(*charts: str) -> str:
    drawn = "".join(charts)
    return f'<div class="charts">{drawn}</div>' if drawn else ""


def _space(block: str) -> str:
    return f'<div style="margin-top:14px">{block}</div>' if block else ""

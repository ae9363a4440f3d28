"""The report's page: its sections and charts, in order."""

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
from specjax.parallel import processes

REPORT_FILE = "report.html"
# Colors of the palette in style.css.
COLORS = 6
POSITION = re.compile(r"rollout/acceptance_rate_pos_(\d+)")
# Times of asynchronous steps, and what else is known of their rollouts, by the labels of lines.
IDLE = {
    "time/training_mesh_idle": "training mesh, exposed generation",
    "time/rollout_mesh_idle": "rollout mesh",
    "time/rollout_wait": "host waits for the rollout",
}
AHEAD = {"asynchronous/lag": "lag", "asynchronous/waiting": "rollouts in flight"}
# Color of each stage of a probe step, in order. The stages sum to time/step.
STAGES = {"data": 6, "prepare": 4, "generation": 1, "reward": 5, "logprob": 3, "train": 2}


def write_report(directory: Path) -> Path:
    """Write report.html into the directory of a finished or unfinished run. Return its path.

    Raises ConfigError if the directory is not a run directory.
    """
    path = directory / REPORT_FILE
    # A damaged record may hold half of a surrogate pair, which UTF-8 cannot encode.
    write_atomically(path, page(read_run(directory)).encode("utf-8", "replace"))
    return path


def try_report(directory: Path) -> None:
    """Write report.html and print its path. Never raises, so that a failed run shows its original error."""
    if not processes.primary():
        return
    try:
        console.print(f"report: {write_report(directory)}")
    except Exception as error:
        console.print(f"report.html not written: {type(error).__name__}: {error}")


def page(run: Run) -> str:
    """Return the whole report as HTML."""
    sections = [
        ("", _head(run)),
        ("Learning", _charts(*_learning(run))),
        ("Speculative decoding", _charts(*_drafting(run))),
        ("Optimisation", _charts(*_optimisation(run))),
        ("Time", _charts(*_time(run))),
        ("Other metrics", _charts(*_other_metrics(run))),
        ("Completions", _charts(*_lengths(run)) + _space(completions(run.samples))),
        ("Configuration", _config(run)),
    ]
    body = "".join((f"<h2>{title}</h2>" if title else "") + content for title, content in sections if content)
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
        first_start = starts[0][1]
        versions = ", ".join(f"{name} {version}" for name, version in first_start["versions"].items())
        date = first_start["date"].replace("T", " ")
        lines.append(f"{escape(date)} on {escape(first_start['device'])} ({escape(first_start['host'])})")
        lines.append(escape(versions))
    if len(starts) > 1:
        lines.append("resumed after step " + ", ".join(str(step) for step, _ in starts[1:]))
    about = "".join(f'<p class="soft">{line}</p>' for line in lines)
    tiles = "".join(f'<div class="tile"><b>{value}</b><span>{label}</span></div>' for label, value in _key_figures(run))
    items = "".join(f"<li>{escape(line)}</li>" for line in warnings(run))
    box = f'<div class="warnings"><b>Warnings</b><ul>{items}</ul></div>' if items else ""
    return f'<h1>{escape(run.name)}</h1>{about}<div class="tiles">{tiles}</div>{box}'


def _key_figures(run: Run) -> Iterator[tuple[str, str]]:
    """Yield (label, value) of each key figure of the run, for the tiles at the top."""
    done = int(run.steps[-1]) if len(run.steps) else 0
    yield f"of {run.config.get('steps')} steps done", str(done)
    result = {name: value for _, values in run.events_of("result") for name, value in values.items()}
    if {"accuracy_before", "accuracy_after"} <= result.keys():
        yield f"held-out accuracy, {result['accuracy_before']:.1%} before RL", f"{result['accuracy_after']:.1%}"
    elif len(held_out := run.measured("eval/accuracy")[1]):
        yield "held-out accuracy, last", f"{held_out[-1]:.1%}"
    for metric, label, percent in (
        ("reward/accuracy", "training accuracy, last tenth", True),
        ("reward/mean", "reward, last tenth", False),
        ("rollout/acceptance_length", "acceptance length, last tenth", False),
    ):
        values = run.measured(metric)[1]
        if len(values):
            yield label, number(float(values[-max(len(values) // 10, 1) :].mean()), percent)
    if "step_speedup" in result:
        yield "generation speed-up at the end", f"{result['generation_speedup']:.2f}x"
        yield "step speed-up at the end", f"{result['step_speedup']:.2f}x"
    elif len(speedups := run.measured("perf/speedup_vs_autoregressive")[1]):
        yield "generation speed-up, last probe", f"{speedups[-1]:.2f}x"
    exposed, steps = (run.metrics.get(name, np.zeros(0)) for name in ("time/training_mesh_idle", "time/step"))
    if (both := np.isfinite(exposed) & (steps > 0) if len(exposed) else exposed).any():
        yield "of the time of steps is exposed generation", f"{exposed[both].sum() / steps[both].sum():.1%}"
    for metric, label, show in (
        ("rollout/tokens", "tokens generated", number),
        ("time/step", "total time of steps", duration),
    ):
        values = run.measured(metric)[1]
        if len(values):
            yield label, show(float(values.sum()))


def _learning(run: Run) -> Iterator[str]:
    yield _lines(run, "Reward", {"reward/mean": "mean"}, hint="of all scored completions")
    standard = {f"reward/{name}" for name in ("mean", "std", "accuracy", "failed", "overlong")}
    components = {
        name: name.removeprefix("reward/")
        for name in run.metrics
        if name.startswith("reward/") and name not in standard
    }
    if components:
        yield _lines(run, "Reward components", components, hint="unweighted", zero=True)
    if run.measured("reward/overlong")[1].any():
        yield _lines(run, "Length penalty", {"reward/overlong": "mean"}, hint="not part of the reward", zero=True)
    accuracy = [_series(run, "reward/accuracy", "training", 1), _series(run, "eval/accuracy", "held out", 2)]
    yield line_chart("Accuracy", accuracy, percent=True, zero=True, span=_span(run))
    yield _lines(run, "Completion length", {"rollout/length_mean": "mean", "rollout/length_max": "longest"}, zero=True)
    yield _lines(
        run,
        "Truncated",
        {"rollout/truncated": "fraction of completions"},
        hint="completions that reach the length budget",
        percent=True,
        zero=True,
    )
    yield _lines(
        run,
        "Zero-variance groups",
        {"groups/zero_variance": "groups"},
        hint="all samples have the same reward: no gradient",
        zero=True,
    )
    sequences = {"groups/sequences_trained": "trained on", "rollout/empty": "empty"}
    yield _lines(run, "Sequences per step", sequences, hint="empty: nothing before the stop token", zero=True)


def _drafting(run: Run) -> Iterator[str]:
    yield _lines(
        run,
        "Acceptance length",
        {"rollout/acceptance_length": "acceptance length", "rollout/draft_length": "draft length"},
        hint="tokens per verification: the accepted ones and the one after them",
        zero=True,
    )
    positions = sorted(int(match[1]) for name in run.metrics if (match := POSITION.fullmatch(name)))
    rates = {f"rollout/acceptance_rate_pos_{i}": f"position {i}" for i in positions}
    yield _lines(run, "Acceptance by position", rates, hint="of the rounds that could emit it", percent=True, zero=True)
    acceptance = [
        _series(run, "draft/measured_acceptance", "measured", 1),
        _series(run, "draft/promised_acceptance", "promised at least", 2, dashed=True),
        _series(run, "draft/predicted_acceptance", "predicted, all tokens", 6, dashed=True),
    ]
    hint = "position 1: measured in the rollout, promised by the training forward for the same tokens"
    yield line_chart(
        "Measured and promised acceptance", acceptance, hint=hint, percent=True, zero=True, span=_span(run)
    )
    yield _lines(
        run,
        "Generation speed-up",
        {"perf/speedup_vs_autoregressive": "speed-up"},
        hint="over draft length 0, at probes",
        zero=True,
        reference=1.0,
    )
    yield _lines(
        run,
        "Log-prob gap",
        {"rollout/logprob_gap_mean": "mean"},
        hint="rollout against training, same tokens",
        zero=True,
    )


def _optimisation(run: Run) -> Iterator[str]:
    yield _lines(run, "Policy loss", {"loss/policy": "loss"})
    yield _lines(run, "Draft loss", {"loss/draft": "loss"}, zero=True)
    yield _lines(run, "Entropy", {"entropy": "nats per token"}, zero=True)
    yield _lines(run, "KL to the reference", {"kl/reference": "nats per token"}, zero=True)
    norms = {"grad_norm/policy": "policy", "grad_norm/draft": "draft"}
    yield _lines(run, "Gradient norms", norms, hint="before clipping", zero=True)
    yield _lines(run, "Clip fraction", {"loss/clip_fraction": "fraction of tokens"}, percent=True, zero=True)
    yield _lines(run, "Importance ratio", {"ratio/max": "largest"}, hint="policy over rollout, per token")


def _time(run: Run) -> Iterator[str]:
    steps, _ = run.measured("time/generation")
    if len(steps):
        probed = np.isin(run.steps, steps)
        stages = {
            name: (color, np.nan_to_num(run.metrics[f"time/{name}"][probed]))
            for name, color in STAGES.items()
            if f"time/{name}" in run.metrics
        }
        yield bar_chart("Stages of a step", steps, stages, hint="seconds, at probe steps")
        yield _stage_table(stages)
    yield _lines(run, "Step time", {"time/step": "seconds"}, hint="the first step compiles", zero=True)
    tokens, seconds = run.metrics.get("rollout/tokens"), run.metrics.get("time/step")
    if tokens is not None and seconds is not None:
        speed = np.divide(tokens, seconds, out=np.full(len(tokens), np.nan), where=seconds > 0)
        finite = np.isfinite(speed)
        series = [
            Series("whole step", run.steps[finite], speed[finite], 2),
            _series(run, "perf/generation_tokens_per_s", "generation alone, at probes", 1),
        ]
        yield line_chart("Tokens per second", series, zero=True, span=_span(run))
    yield _lines(run, "Idle meshes", IDLE, hint="seconds per step of an asynchronous run", zero=True)
    yield _lines(run, "Lag", AHEAD, hint="updates from the networks that generate to those that train", zero=True)


def _other_metrics(run: Run) -> Iterator[str]:
    """Yield a chart for each nonstandard metric, such as those of a custom loss or drafter."""
    shown = {*STANDARD_METRICS, *IDLE, *AHEAD}
    for name in run.metrics:
        if name not in shown and not name.startswith("reward/") and not POSITION.fullmatch(name):
            yield _lines(run, name, {name: name.rpartition("/")[2]})


def _stage_table(stages: dict[str, tuple[int, np.ndarray]]) -> str:
    """Return a table of mean seconds per stage. stages: color and seconds [probe steps] by name."""
    means = {name: float(values.mean()) for name, (_, values) in stages.items()}
    total = sum(means.values())
    rows = "".join(
        f'<tr><td><i class="b{stages[name][0]}"></i>{name}</td><td>{mean:.3f}</td><td>{mean / total:.1%}</td></tr>'
        for name, mean in means.items()
    )
    return (
        '<figure class="chart"><figcaption>Stages of a step<small>mean over all probe steps</small></figcaption>'
        f"<table><tr><th>stage</th><th>seconds</th><th>share</th></tr>{rows}"
        f"<tr><td>all</td><td>{total:.3f}</td><td></td></tr></table></figure>"
    )


def _lengths(run: Run) -> Iterator[str]:
    samples = [sample for sample in run.samples if sample["lengths"]]
    if samples:
        budget = max(sample["budget"] for sample in samples)
        first_and_last = samples[:1] if len(samples) == 1 else [samples[0], samples[-1]]
        groups = {
            f"step {sample['step']}": (color, np.array(sample["lengths"]))
            for sample, color in zip(first_and_last, (6, 1) if len(first_and_last) > 1 else (1,), strict=True)
        }
        hint = f"in tokens; the last bar holds completions at the budget of {budget}"
        yield histogram("Completion length distribution", groups, budget, hint=hint)


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
    # When the colors run out, they repeat with dashed lines.
    styles = ((i % COLORS + 1, i >= COLORS) for i in range(len(metrics)))
    series = [_series(run, name, label, *style) for (name, label), style in zip(metrics.items(), styles, strict=True)]
    return line_chart(title, series, span=_span(run), **options)


def _series(run: Run, metric: str, label: str, color: int, dashed: bool = False) -> Series:
    return Series(label, *run.measured(metric), color, dashed)


def _span(run: Run) -> tuple[int, int] | None:
    return (int(run.steps[0]), int(run.steps[-1])) if len(run.steps) else None


def _charts(*charts: str) -> str:
    html = "".join(charts)
    return f'<div class="charts">{html}</div>' if html else ""


def _space(block: str) -> str:
    return f'<div style="margin-top:14px">{block}</div>' if block else ""

"""Steps of an asynchronous run beside those of the synchronous one: the second table of arXiv 2604.26779."""

import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Column, Table

from launch.build.experiment import Experiment
from launch.build.memory import check_training
from launch.cli.errors import ConfigError
from launch.cli.unfinished import Unfinished
from launch.comparison.stage_times import VariantReport
from launch.comparison.variants import AUTOMATIC, PLAIN, Variant
from specjax.parallel import processes
from specjax.train.asynchronous import AsynchronousStep

# The rows of the two kinds are measured in different ways.
NOTE = (
    "synchronous: medians of stages that the host waits for one by one, variants in turns; train: scoring, log-probs "
    "and updates\n"
    "lag: means over steps that overlap, one variant after the other; exposed generation: how long the training mesh "
    "was idle, so with scoring on the host; train: the rest of the step"
)
# Steps before the timed ones, beside as many as the lag: they compile, and train the draft once.
WARM_STEPS = 3


@dataclass(frozen=True)
class OverlapReport:
    """Times of a kind of step, in seconds.

    Attributes:
        devices:      Devices that it uses.
        step_s:       A whole step. Asynchronous: mean over the timed steps, whose times overlap.
        exposed_s:    Generation that training waits for. Asynchronous: for how long the training mesh is idle, so with
                      scoring on the host.
        generation_s: A rollout.
        train_s:      Scoring, log-probs and updates. Asynchronous: the rest of the step.
    """

    devices: int
    step_s: float
    exposed_s: float
    generation_s: float
    train_s: float


def compare_overlap(
    experiment: Experiment,
    variants: Mapping[str, Variant],
    reports: Mapping[str, VariantReport],
    console: Console,
    unfinished: Unfinished,
) -> dict[str, Any]:
    """Time asynchronous steps, and print them beside synchronous ones: autoregressive, and at the fastest draft length.

    The fastest is that of the synchronous steps. Returns the results for the JSON file, none if `experiment` is not
    asynchronous. Raises Stopped at a signal.
    """
    if experiment.config.asynchronous.lag is None:
        return {}
    fixed = [name for name in reports if name not in (PLAIN, AUTOMATIC)]
    names = PLAIN, min(fixed, key=lambda name: reports[name].step_s)
    kind = f"lag {experiment.config.asynchronous.lag}"
    found = {
        "synchronous": {name: _synchronous(experiment, reports[name]) for name in names},
        kind: {
            name: time_ahead(experiment, variants[name], f"{kind}, draft length {name}", unfinished) for name in names
        },
    }
    print_overlap(found, console)
    console.print(NOTE)
    if experiment.mesh.devices.flat[0].platform == "cpu":
        console.print("these are CPU devices, which share cores and memory: their absolute figures mean little")
    reports_json = {kind: {name: asdict(each) for name, each in reports.items()} for kind, reports in found.items()}
    return {"asynchronous": reports_json}


def synchronous(experiment: Experiment) -> Experiment:
    """Return the experiment with rollouts on its training mesh.

    Raises ConfigError if the devices cannot hold the steps of one of the two, or if several processes would have to
    time the asynchronous ones.
    """
    lag = experiment.config.asynchronous.lag
    if lag is not None and processes.count() > 1:
        raise ConfigError(f"asynchronous.lag = {lag}: must be None where several processes compare")
    result = replace(experiment, rollout_mesh=experiment.mesh)
    for each in (experiment, result):
        check_training(each)
    return result


def _synchronous(experiment: Experiment, report: VariantReport) -> OverlapReport:
    generation_s = report.seconds["generation"]
    train_s = sum(report.seconds[stage] for stage in ("reward", "logprob", "train"))
    return OverlapReport(experiment.mesh.size, report.step_s, generation_s, generation_s, train_s)


def time_ahead(experiment: Experiment, variant: Variant, name: str, unfinished: Unfinished) -> OverlapReport:
    """Time asynchronous steps at the variant's draft length and from its start. Raises Stopped at a signal."""
    stages, config = variant.step.stages, variant.step.stages.config
    if variant.chosen is not None:
        # The draft length of the variant, in place of one that the step chooses.
        length = config.rollout.lengths[variant.chosen[0]]
        config = replace(config, rollout=replace(config.rollout, draft_length=length, draft_lengths=()))
    step = AsynchronousStep(replace(stages, config=config), experiment.rollout_mesh)
    lag, steps, batches = experiment.config.asynchronous.lag or 0, experiment.config.steps, experiment.train_batches()
    state = jax.tree.map(jnp.copy, replace(variant.start, drafting=None))
    start, measured = time.perf_counter(), list[tuple[float, float]]()
    for _ in range(lag):
        state = step.begin(state, next(batches))
    with unfinished.phase(f"steps of {name}", WARM_STEPS + lag + steps, "steps", kept=False) as phase:
        for number in range(phase.total):
            if number == phase.total - steps:
                start = time.perf_counter()
            state, _, metrics = step(state, next(batches))
            idle_s, busy_s = metrics["time/training_mesh_idle"], metrics["time/rollout_mesh_busy"]
            measured.append((float(idle_s), float(busy_s)))
            phase.finish()
    step_s = (time.perf_counter() - start) / steps
    idle_s, generation_s = (statistics.fmean(values) for values in zip(*measured[-steps:], strict=True))
    devices = experiment.mesh.size + experiment.rollout_mesh.size
    return OverlapReport(devices, step_s, idle_s, generation_s, max(step_s - idle_s, 0.0))


def print_overlap(found: Mapping[str, Mapping[str, OverlapReport]], console: Console) -> None:
    """Print a table with a row for each kind of run and variant, and speed-ups over the first row."""
    headers = ("devices", "step", "exposed generation", "generation", "train", "step x", "per device")
    columns = Column("run"), Column("draft length"), *(Column(name, justify="right", no_wrap=True) for name in headers)
    title = "seconds of a step; speed-ups over the first row, of the step and for the same number of devices"
    table = Table(*columns, box=None, padding=(0, 0, 0, 2), title=title, title_justify="left")
    first = next(iter(next(iter(found.values())).values()))
    for kind, reports in found.items():
        for name, report in reports.items():
            seconds = report.step_s, report.exposed_s, report.generation_s, report.train_s
            speedup = first.step_s / report.step_s
            ratios = speedup, speedup * first.devices / report.devices
            table.add_row(
                *(kind, name, str(report.devices)), *(f"{x:.3g}" for x in seconds), *(f"{x:.2f}" for x in ratios)
            )
    console.print(table)

"""Steps of an asynchronous run beside synchronous steps: the second table of arXiv 2604.26779."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Column, Table

from launch.comparison.stage_times import Interval, VariantReport
from launch.comparison.variants import AUTOMATIC, PLAIN, NumberedBatches, Variant
from launch.costs.turns import Record, timed_turns
from launch.errors import ConfigError
from launch.phases.long_phases import long_phase
from launch.predict.refusals import check_training
from launch.setup.experiment import Experiment
from launch.timing import describe_interval, interval, show_interval
from specjax.asynchronous.step import AsynchronousStep
from specjax.parallel import processes

SYNCHRONOUS = "synchronous"
# Steps of each kind in a turn. With lag, others come before them and fill the pipeline.
BLOCK = 3
NOTE = (
    f"medians over turns of {BLOCK} steps of each row, on the same prompts with the same seeds\n"
    "synchronous: the host waits for each stage; train: log-probs and updates\n"
    "lag: exposed generation: how long the training mesh is idle, less scoring on the host; train: how long it is busy"
)


@dataclass(frozen=True)
class OverlapReport:
    """Times of a kind of step, in seconds: medians over the turns.

    Attributes:
        devices:        Devices that it uses.
        step_s:         A whole step.
        exposed_s:      Generation that training waits for.
        generation_s:   A rollout.
        scoring_s:      Scoring; with lag that on the host, since a traced reward is part of training.
        train_s:        Log-probs and updates.
        step_speedup:   Over the first kind of step, from pairs of the same turn.
        device_speedup: The same for equal numbers of devices.
        turns:          Mean seconds of a step in each turn.
    """

    devices: int
    step_s: float
    exposed_s: float
    generation_s: float
    scoring_s: float
    train_s: float
    step_speedup: Interval
    device_speedup: Interval
    turns: Sequence[Record]


class LaggingVariant:
    """Asynchronous steps at the draft length of a variant, in blocks that each begin with its start."""

    def __init__(self, experiment: Experiment, variant: Variant) -> None:
        stages, config = variant.step.stages, variant.step.stages.config
        if variant.chosen is not None:
            # The draft length of the variant, in place of one that the step chooses.
            length = config.rollout.lengths[variant.chosen[0]]
            config = replace(config, rollout=replace(config.rollout, draft_length=length, draft_lengths=()))
        self._step = AsynchronousStep(replace(stages, config=config), experiment.rollout_mesh)
        self._start, self._batches = replace(variant.start, drafting=None), NumberedBatches(experiment)
        self._lag = experiment.config.asynchronous.lag or 0
        self._replicated = NamedSharding(experiment.mesh, P())

    def time_block(self, first: int) -> Record:
        """Return the mean seconds of BLOCK steps. They train on the rollouts of the batches from `first` on.

        Before them come `lag` rollouts and `lag + 1` steps, with the batches before `first`.
        """
        before = self._lag + 1
        number = processes.place(np.int32(first - before), self._replicated)
        state = jax.tree.map(jnp.copy, replace(self._start, step=number))
        self._batches.skip_to(first - before)
        for _ in range(self._lag):
            state = self._step.begin(state, next(self._batches))
        updates, metrics = [], []
        for _ in range(before + BLOCK):
            state, _, step_metrics = self._step(state, next(self._batches))
            updates.append(self._step.updated)
            metrics.append(step_metrics)
        jax.block_until_ready(state)
        self._start = replace(self._start, adaptation=state.adaptation)
        spans = [update.result() for update in updates[-BLOCK:]]
        scoring = [float(step_metrics.get("time/reward", 0.0)) for step_metrics in metrics[-BLOCK:]]
        return _means(
            {
                "step_s": span.idle_s + span.busy_s,
                "exposed_s": max(span.idle_s - scoring_s, 0.0),
                "generation_s": float(step_metrics["time/rollout_mesh_busy"]),
                "scoring_s": scoring_s,
                "train_s": span.busy_s,
            }
            for span, scoring_s, step_metrics in zip(spans, scoring, metrics[-BLOCK:], strict=True)
        )


def compare_overlap(
    experiment: Experiment,
    variants: Mapping[str, Variant],
    reports: Mapping[str, VariantReport],
    console: Console,
    keep: Callable[[dict[str, Any]], None],
) -> None:
    """Time synchronous and asynchronous steps in turns, autoregressive and at the fastest draft length, and print them.

    Does nothing if `experiment` is not asynchronous. Raises Stopped at a signal. Whatever ends the turns, those before
    are printed.

    reports: of synchronous steps. They decide which draft length is fastest.
    keep:    called after each turn with the results so far, for the JSON file.
    """
    lag, steps = experiment.config.asynchronous.lag, experiment.config.steps
    if lag is None:
        return
    fixed = [name for name in reports if name not in (PLAIN, AUTOMATIC)]
    names = PLAIN, min(fixed, key=lambda name: reports[name].step_s)
    lagging = {name: LaggingVariant(experiment, variants[name]) for name in names}

    def first(block: int) -> int:
        """Return the first timed batch of a block. All variants have read the batches up to `steps`."""
        return steps + 1 + block * (2 * lag + 1 + BLOCK) + lag + 1

    with long_phase("first steps ahead", len(names), "variants", kept=False) as phase:
        for name, variant in lagging.items():
            variant.time_block(first(0))
            phase.finish(program=name)
    timers = {(SYNCHRONOUS, name): partial(_time_synchronous, variants[name]) for name in names}
    timers |= {(f"lag {lag}", name): lagging[name].time_block for name in names}
    runs = {
        f"{kind}, {name}": lambda turn, timer=timer: timer(first(turn + 1)) for (kind, name), timer in timers.items()
    }
    devices = {SYNCHRONOUS: experiment.mesh.size, f"lag {lag}": experiment.mesh.size + experiment.rollout_mesh.size}
    kinds = dict[str, dict[str, OverlapReport]]()

    def report(turns: list[Record]) -> None:
        for kind, name in timers:
            baseline, times = ([turn[run] for turn in turns] for run in (f"{SYNCHRONOUS}, {PLAIN}", f"{kind}, {name}"))
            fewer = devices[SYNCHRONOUS] / devices[kind]
            kinds.setdefault(kind, {})[name] = overlap_report(times, baseline, devices[kind], fewer)
        keep({"asynchronous": {kind: {x: asdict(y) for x, y in rows.items()} for kind, rows in kinds.items()}})

    phase = long_phase("steps that overlap", -(-steps // BLOCK), "turns", kept=False)
    try:
        timed_turns(phase, runs, keep=report)
    finally:
        if kinds:
            print_overlap(kinds, console)
            console.print(NOTE)
            if experiment.mesh.devices.flat[0].platform == "cpu":
                console.print("these are CPU devices, which share cores and memory: their absolute figures mean little")


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


def overlap_report(turns: Sequence[Record], baseline: Sequence[Record], devices: int, fewer: float) -> OverlapReport:
    """Return the report of a kind of step, with speed-ups over the steps of `baseline` in the same turns.

    fewer: devices of the baseline over its own.
    """
    ratios = [a["step_s"] / b["step_s"] for a, b in zip(baseline, turns, strict=True)]
    seconds = {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
    return OverlapReport(
        devices,
        **seconds,
        step_speedup=interval(ratios),
        device_speedup=interval([fewer * ratio for ratio in ratios]),
        turns=turns,
    )


def _time_synchronous(variant: Variant, first: int) -> Record:
    """Return the mean seconds of BLOCK steps on the batches from `first` on."""
    steps = [variant.time_step(first + number) for number in range(BLOCK)]
    return _means(
        {
            "step_s": step.step_s,
            "exposed_s": step.seconds["generation"],
            "generation_s": step.seconds["generation"],
            "scoring_s": step.seconds["reward"],
            "train_s": step.seconds["logprob"] + step.seconds["train"],
        }
        for step in steps
    )


def _means(steps: Iterable[Record]) -> Record:
    records = list(steps)
    return {name: statistics.fmean(step[name] for step in records) for name in records[0]}


def print_overlap(overlaps: Mapping[str, Mapping[str, OverlapReport]], console: Console) -> None:
    """Print a table with a row for each kind of run and variant, and speed-ups over the first row."""
    headers = ("devices", "step", "exposed generation", "generation", "scoring", "train", "step x", "per device")
    columns = Column("run"), Column("draft length"), *(Column(name, justify="right", no_wrap=True) for name in headers)
    turns = max(len(report.turns) for reports in overlaps.values() for report in reports.values())
    title = f"seconds of a step; speed-ups over the first row{describe_interval(turns)}, of the step and per device"
    table = Table(*columns, box=None, padding=(0, 0, 0, 2), title=title, title_justify="left")
    for kind, reports in overlaps.items():
        for name, report in reports.items():
            seconds = report.step_s, report.exposed_s, report.generation_s, report.scoring_s, report.train_s
            ratios = (show_interval(ratio, ".2f") for ratio in (report.step_speedup, report.device_speedup))
            table.add_row(*(kind, name, str(report.devices)), *(f"{x:.3g}" for x in seconds), *ratios)
    console.print(table)

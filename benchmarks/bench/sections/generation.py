"""Section on the generation speed-up, by draft length and forced acceptance."""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from benchmarks.bench.models import BenchNetworks, random_prompts
from benchmarks.bench.presets import Preset
from benchmarks.bench.report import NO_ROOM, BenchSection, Row, ratio, where_it_fits
from benchmarks.bench.rollout_timer import RolloutTime
from benchmarks.bench.timers import rollout_timer
from launch.timing import turn_by_turn
from specjax.rollout.plan import RolloutConfig


def acceptance(networks: BenchNetworks, preset: Preset) -> Iterator[BenchSection]:
    """Measure the speed-up over autoregressive decoding at forced acceptance rates."""
    title = f"speed-up at forced acceptance, batch {preset.batch}, {preset.prompt} + {preset.new} tokens"
    notes = [
        "forced acceptance: drafter and verifier do all their work, but the output distribution is not kept",
        "alpha: acceptance length, active rows only; cost: seconds of a round over those of an autoregressive round",
        "whole completions including prefill, interleaved with autoregressive decoding",
        NO_ROOM,
    ]
    for rows in where_it_fits({"k": None}, partial(_speedups, networks, preset)):
        yield BenchSection(title, rows, notes)


def _speedups(networks: BenchNetworks, preset: Preset) -> Iterator[list[Row]]:
    """Yield after each turn a row for each draft length and rate, measured interleaved with autoregressive decoding."""
    prompts = random_prompts(networks, preset.batch, preset.prompt)
    config = RolloutConfig(group_size=1, max_new_tokens=preset.new)
    timers = {
        k: rollout_timer(networks, prompts, replace(config, draft_length=k), forced=k > 0)
        for k in (0, *preset.draft_lengths)
    }
    runs: dict[tuple[int, float | None], Callable[[], RolloutTime]] = {
        (k, rate): partial(timer.measure, 0, np.float32(rate or 0))
        for k, timer in timers.items()
        for rate in (preset.rates if k else (None,))
    }
    for measured in turn_by_turn(runs, preset.repeats):
        autoregressive = measured[0, None]
        yield [
            _speedup(k, rate, times, autoregressive) | {"compile s": timers[k].compile_seconds}
            for (k, rate), times in measured.items()
            if k
        ]


def _speedup(k: int, rate: float | None, times: list[RolloutTime], autoregressive: list[RolloutTime]) -> dict:
    """Return the row of a draft length and rate. The times are paired by turn."""
    alpha = times[0].acceptance_length
    cost = ratio([x.seconds_per_round for x in times], [x.seconds_per_round for x in autoregressive])
    speeds, plain_speeds = ([x.tokens_per_s for x in each] for each in (times, autoregressive))
    return {
        "k": k,
        "rate": rate,
        "alpha": alpha,
        "cost": cost,
        "alpha/cost": alpha / cost[0],
        "tokens/s": statistics.median(speeds),
        "speed-up": ratio(speeds, plain_speeds),
        "turns, tokens/s": speeds,
        "turns plain, tokens/s": plain_speeds,
    }

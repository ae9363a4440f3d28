"""Section on layout options: phases, windows, queue, shared prefill, and the ladder of training buckets."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.bench.models import BenchNetworks, random_prompts
from benchmarks.bench.presets import Preset
from benchmarks.bench.report import NO_ROOM, BenchSection, Row, cell_by_cell, ratio, where_it_fits
from benchmarks.bench.rollout_timer import ANY_LENGTH, shrinking
from benchmarks.bench.timers import rollout_timer
from launch.timing import time_call, turn_by_turn
from specjax import kernels
from specjax.rollout.plan import RolloutConfig
from specjax.sampling import SamplingLaw
from specjax.train.batch import TrainBatch, join_completions
from specjax.train.gradients import accumulate
from specjax.train.ladder import sort_rows
from specjax.train.loss_context import LossContext
from specjax.types import Params, Rollout

GROUP, DRAFTED, MICROBATCHES = 8, 3, 4
# Functions that run the same work with an option off and on.
Runs = tuple[Callable[[], object], Callable[[], object]]


def layout(networks: BenchNetworks, preset: Preset) -> Iterator[BenchSection]:
    """Measure the speed-up of each layout option: off and on interleaved, on the same work."""
    makers: dict[str, Callable[[BenchNetworks, Preset], Runs]] = {
        "phases": phases,
        "windows": windows,
        "queue": queue,
        "fewer slots after a queue": phases_after_queue,
        "prefill shared by a group": shared_prefill,
        "ladder in training": ladder,
    }
    if not preset.gradients:
        del makers["ladder in training"]

    def measure(make: Callable[[BenchNetworks, Preset], Runs]) -> Iterator[list[Row]]:
        runs = {name: partial(time_call, run) for name, run in zip(("off", "on"), make(networks, preset), strict=True)}
        for measured in turn_by_turn(runs, preset.repeats):
            row: dict = {f"{name} s": float(np.median(times)) for name, times in measured.items()}
            row |= {"speed-up": ratio(measured["off"], measured["on"])}
            yield [row | {f"turns {name}, s": times for name, times in measured.items()}]

    tail = preset.tail
    notes = [
        f"{GROUP * preset.batch} completions, one in {tail.every} of {tail.longest} tokens, the others around "
        f"{tail.median}; draft length {DRAFTED}, acceptance forced at {preset.peer_rate}",
        f"queue: on, {preset.batch} slots that are refilled when a row ends; off, batches of {preset.batch} rows",
        "windows: on, attention first reads only the positions that most rows need; off, those of the longest row",
        NO_ROOM,
    ]
    if not preset.gradients:
        notes.append("ladder not measured: this preset's gradients do not fit in memory beside its weights")
    for rows in cell_by_cell(where_it_fits({"what": name}, partial(measure, make)) for name, make in makers.items()):
        yield BenchSection("layout options, off and on", rows, notes)


def _config(preset: Preset) -> RolloutConfig:
    return RolloutConfig(group_size=1, max_new_tokens=preset.tail.longest, draft_length=DRAFTED)


def _decode(networks: BenchNetworks, preset: Preset, *plan: tuple[int, int]) -> Callable[[], Rollout]:
    """Return a function that runs the long-tailed rollout in the phases `plan`, each (slots, window)."""
    config = replace(_config(preset), phases=plan)
    prompts = random_prompts(networks, GROUP * preset.batch, preset.prompt)
    return partial(rollout_timer(networks, prompts, config, tail=preset.tail).generate, 0, np.float32(preset.peer_rate))


def halving(slots: int) -> tuple[tuple[int, int], ...]:
    """Return phases (slots, window) that halve the slots down to one, for rows of any length."""
    return tuple((slots >> i, ANY_LENGTH) for i in range(slots.bit_length()))


def phases(networks: BenchNetworks, preset: Preset) -> Runs:
    """Return runs: all slots until the longest row ends (off), fewer slots as rows end (on)."""
    return _decode(networks, preset), _decode(networks, preset, *shrinking(GROUP * preset.batch))


def windows(networks: BenchNetworks, preset: Preset) -> Runs:
    """Return runs: attention over all positions (off), first over those that most rows need (on)."""
    sequences = GROUP * preset.batch
    short_window = sequences, preset.prompt + 3 * preset.tail.median // 2
    shrink = shrinking(sequences)
    return _decode(networks, preset, *shrink), _decode(networks, preset, short_window, *shrink)


def queue(networks: BenchNetworks, preset: Preset) -> Runs:
    """Return runs: batches one after another, each to its end (off), slots refilled as rows end (on)."""
    slots, rate = preset.batch, np.float32(preset.peer_rate)
    prompts = random_prompts(networks, GROUP * slots, preset.prompt)
    batches = [
        jax.tree.map(lambda x, start=start: x[start : start + slots], prompts)
        for start in range(0, GROUP * slots, slots)
    ]
    timer = rollout_timer(networks, batches, _config(preset), tail=preset.tail)
    return lambda: [timer.generate(turn, rate) for turn in range(GROUP)], _decode(networks, preset, (slots, ANY_LENGTH))


def phases_after_queue(networks: BenchNetworks, preset: Preset) -> Runs:
    """Return runs with a queue: the same slots until the longest row ends (off), fewer once no row waits (on)."""
    return _decode(networks, preset, (preset.batch, ANY_LENGTH)), _decode(networks, preset, *halving(preset.batch))


def shared_prefill(networks: BenchNetworks, preset: Preset) -> Runs:
    """Return runs of short completions of long prompts: one prefill per sequence (off), one per group (on)."""

    def run(rows: int, group: int) -> Callable[[], Rollout]:
        config = RolloutConfig(group_size=group, max_new_tokens=preset.tail.median, draft_length=DRAFTED)
        prompts = random_prompts(networks, rows, preset.contexts[0])
        return partial(rollout_timer(networks, prompts, config).generate, 0, np.float32(preset.peer_rate))

    return run(GROUP * preset.batch, 1), run(preset.batch, GROUP)


def ladder(networks: BenchNetworks, preset: Preset) -> Runs:
    """Return runs of the gradient of both losses: rows padded to the longest (off), sorted and cut to buckets (on)."""
    tail, mesh = preset.tail, networks.mesh
    prompts = random_prompts(networks, GROUP * preset.batch, preset.prompt)
    config = RolloutConfig(group_size=1, max_new_tokens=tail.longest, draft_length=0)
    rollout = rollout_timer(networks, prompts, config, tail=tail).generate(0, np.float32(0))
    # A forced completion ends with STOP, which is not in the vocabulary.
    rollout = replace(rollout, tokens=jnp.maximum(rollout.tokens, 0))
    sequences = join_completions(prompts, rollout, jnp.ones(len(rollout.lengths)))
    batch, params = TrainBatch(**vars(sequences), advantage=jnp.ones(sequences.tokens.shape)), networks.trained

    def run(ladder: tuple[int, ...]) -> Callable[[], object]:
        context = LossContext(
            networks.policy, networks.drafter, SamplingLaw(), microbatches=MICROBATCHES, ladder=ladder
        )

        def gradients(params: Params, batch: TrainBatch) -> Params:
            rows = sort_rows(batch, mesh, MICROBATCHES) if ladder else batch
            return accumulate(context, params, rows)[0]

        options = kernels.compiler_options(networks.policy.dtype)
        with jax.set_mesh(mesh):
            program = jax.jit(gradients, compiler_options=options).lower(params, batch).compile()
        jax.block_until_ready(program(params, batch))
        return partial(program, params, batch)

    return run(()), run((preset.prompt + tail.median, preset.prompt + 3 * tail.median // 2))

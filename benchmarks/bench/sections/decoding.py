"""Sections that time rounds: the memory-bandwidth floor, verification, the drafter."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.bench.models import BenchNetworks, fits, with_block
from benchmarks.bench.presets import Preset
from benchmarks.bench.report import NO_ROOM, BenchSection, Row, cell_by_cell, ratio, where_it_fits
from benchmarks.bench.stubs import FreeDrafter
from benchmarks.bench.timers import round_timer
from launch.timing import time_call, turn_by_turn
from models.sheets import decoder_sheet
from specjax.cost import Cell, fit, relative_errors
from specjax.drafters import Drafter, NoDrafter
from specjax.types import Policy, PyTree

# Passes over the array in one bandwidth measurement.
COPIES = 8
# Names of the drafts of a preset.
EAGLE3, BLOCK = "eagle3", "dspark"
BLOCK_OVER_IT = f"{BLOCK} / this"
# A draft's name and a draft length.
Kind = tuple[str, int]


def floor(networks: BenchNetworks, preset: Preset) -> Iterator[BenchSection]:
    """Measure autoregressive decoding: tokens/s, and the memory-bandwidth floor over the measured time."""
    copy, weights = CopyBandwidth(), read_bytes(networks.policy, networks.trained.policy)
    position = decoder_sheet(networks.decoder).cache_bytes(networks.policy.dtype.itemsize)

    def measure(context: int, batch: int) -> Iterator[list[Row]]:
        no_drafter = NoDrafter()
        kinds = {"round": (no_drafter, 0)}
        timer = round_timer(networks, no_drafter, batch, context, kinds, preset.rounds)
        # Interleaved, so that a slowdown of the machine affects both alike.
        runs = timer.start(networks.params) | {"copy": copy.measure}
        cache = batch * (context + preset.rounds // 2) * position
        for measured in turn_by_turn(runs, preset.repeats):
            floor_s = [(weights + cache) / bandwidth for bandwidth in measured["copy"]]
            row: Row = {
                "ms a round": 1e3 * float(np.median(measured["round"])),
                "tokens/s": batch / float(np.median(measured["round"])),
                "floor ms": 1e3 * float(np.median(floor_s)),
                "share of floor": ratio(floor_s, measured["round"]),
                "GB/s": float(np.median(measured["copy"])) / 1e9,
                "compile s": timer.compile_seconds["round"],
                "turns, s": measured["round"],
            }
            yield [row]

    notes = [
        f"floor: bytes that a round reads, weights ({weights / 1e6:.1f} MB) and visible cache, over copy bandwidth",
        f"copy bandwidth: {copy.nbytes / 1e6:.0f} MB, counted as read once and written once; a CPU that reads a line "
        "before writing it moves more, so decoding, which only reads, can beat the floor",
        NO_ROOM,
    ]
    for rows in _each_cell(networks, preset, measure):
        yield BenchSection("autoregressive decoding against the memory-bandwidth floor", rows, notes)


def verify(networks: BenchNetworks, preset: Preset) -> Iterator[BenchSection]:
    """Measure T(n)/T(1), where T(n) is the time to forward, verify and commit n tokens, without drafting."""
    free, lengths = FreeDrafter(networks.policy.vocab_size), [n - 1 for n in preset.verified]

    def measure(context: int, batch: int) -> Iterator[list[Row]]:
        timer = round_timer(networks, free, batch, context, {k: (free, k) for k in lengths}, preset.rounds)
        for measured in turn_by_turn(timer.start(networks.params), preset.repeats):
            row: dict = {"T(1) ms": 1e3 * float(np.median(measured[0]))}
            row |= {f"T({k + 1})/T(1)": ratio(measured[k], measured[0]) for k in lengths if k}
            row |= {"compile s": sum(timer.compile_seconds.values())}
            yield [row | {f"turns of T({k + 1}), s": times for k, times in measured.items()}]

    for rows in _each_cell(networks, preset, measure):
        yield BenchSection("verification of n tokens over verification of one", rows, [NO_ROOM])


def draft(networks: BenchNetworks, preset: Preset) -> Iterator[BenchSection]:
    """Measure the cost of a speculative round in plain rounds, the drafter's part, and the speed-up at given rates.

    The EAGLE-3 head drafts at each draft length, the block draft as many tokens as its block has.
    """
    free, blocks, size = FreeDrafter(networks.policy.vocab_size), with_block(networks, preset), preset.block.block_size
    lengths, longest = preset.draft_lengths, max((*preset.draft_lengths, size))
    cells = dict[tuple[int, int, int], Cell]()
    kinds: dict[Kind, tuple[Drafter, int]] = {("plain", 0): (free, 0)}
    for k in lengths:
        kinds |= {(f"{EAGLE3} verifying", k): (free, k), (EAGLE3, k): (networks.drafter, k)}
    block_kinds = {(f"{BLOCK} verifying", size): (free, size), (BLOCK, size): (blocks.drafter, size)}

    def measure(context: int, batch: int) -> Iterator[list[Row]]:
        runs, compile_seconds = dict[Kind, Callable[[], float]](), dict[Kind, float]()
        for each, its_kinds in ((networks, kinds), (blocks, block_kinds)):
            # The block draft reads other features, so that its rounds have rows and caches of their own.
            if each is networks or fits(blocks, 2 * batch, context):
                timer = round_timer(each, each.drafter, batch, context, its_kinds, preset.rounds, room_for=longest)
                runs |= timer.start(each.params)
                compile_seconds |= timer.compile_seconds
        # Interleaved, so that a slowdown of the machine affects all alike.
        for measured in turn_by_turn(runs, preset.repeats):
            cells.update(
                {
                    (batch, context, k): Cell(batch, context, k, float(np.median(times)))
                    for (name, k), times in measured.items()
                    if name in ("plain", EAGLE3)
                }
            )
            yield [
                _draft_row(measured, kind, preset, compile_seconds) for kind in measured if kind[0] in (EAGLE3, BLOCK)
            ]

    notes = [
        "costs in plain rounds of the same batch; propose + observe: the drafter's share, the whole round minus one "
        "with free proposals",
        "at RATE: speed-up, tokens of a round over its cost, if a drafted token is accepted with that probability",
        f"{BLOCK_OVER_IT}: seconds of a round of the block draft over those of this round",
    ]
    for rows in _each_cell(networks, preset, measure):
        found = *_break_even(rows, preset.rates), NO_ROOM, *_cost_model_note(list(cells.values()))
        yield BenchSection("cost of drafting", rows, [*notes, *found])


def _draft_row(
    measured: Mapping[Kind, list[float]], kind: Kind, preset: Preset, compile_seconds: Mapping[Kind, float]
) -> Row:
    """Return the row of a draft at a draft length. measured: seconds of rounds in the turns so far."""
    name, k = kind
    plain, full_round, verifying = measured["plain", 0], measured[kind], measured[f"{name} verifying", k]
    block, cost = measured.get((BLOCK, preset.block.block_size)), ratio(full_round, plain)
    row: dict = {
        "draft": name,
        "k": k,
        "plain ms": 1e3 * float(np.median(plain)),
        "round ms": 1e3 * float(np.median(full_round)),
        "propose + observe": ratio(np.subtract(full_round, verifying).tolist(), plain),
        "verify + commit": ratio(verifying, plain),
        "whole round": cost,
    }
    row |= {f"at {rate}": _acceptance_length(rate, k) / cost[0] for rate in preset.rates}
    row[BLOCK_OVER_IT] = None if block is None or name == BLOCK else ratio(block, full_round)
    row |= {"compile s": compile_seconds[kind]}
    return row | {"turns plain, s": plain, "turns verifying, s": verifying, "turns, s": full_round}


def _acceptance_length(rate: float, k: int) -> float:
    """Return the tokens of a round whose k drafted tokens are each accepted at the rate if those before are."""
    return sum(rate**i for i in range(k + 1))


def _break_even(rows: Sequence[Row], rates: Sequence[float]) -> list[str]:
    """Return a note for each EAGLE-3 round: acceptance lengths at which the block draft decodes as fast."""
    notes = []
    for row in rows:
        k, cost = row.get("k"), row.get(BLOCK_OVER_IT)
        if isinstance(k, int) and isinstance(cost, tuple):
            times, low, high = cost
            needed = ", ".join(f"{times * _acceptance_length(rate, k):.2f} at {rate}" for rate in rates)
            notes.append(
                f"{row['batch']} rows, {row['context']} positions: {BLOCK} is as fast as {EAGLE3} at k = {k} if its "
                f"acceptance length is {times:.3g} [{low:.3g}, {high:.3g}] times as long: {needed}"
            )
    return notes


def _cost_model_note(cells: list[Cell]) -> list[str]:
    """Return a note with the cost model fitted to the cells and its relative error; [] for fewer than two cells."""
    if len(cells) < 2:
        return []
    model = fit(cells)
    errors = np.abs(relative_errors(model, cells))
    constants = ", ".join(f"{name} {1e6 * value:.3g}" for name, value in model.constants().items())
    return [
        f"cost model (specjax.cost.CostModel), in microseconds: {constants}; "
        f"relative error {np.median(errors):.0%} in the median cell, at most {errors.max():.0%}"
    ]


def _each_cell(
    networks: BenchNetworks, preset: Preset, measure: Callable[[int, int], Iterator[list[Row]]]
) -> Iterator[list[Row]]:
    """Yield the rows of `measure(context, batch)` for every context and batch of the preset that fit in memory."""

    def measured(context: int, batch: int) -> Iterator[list[Row]]:
        cell: Row = {"context": context, "batch": batch}
        # Tried, it would end the process where memory is promised before it is there, as on a CPU.
        if not fits(networks, batch, context):
            return iter([list[Row]([cell])])
        return where_it_fits(cell, partial(measure, context, batch))

    return cell_by_cell(itertools.starmap(measured, itertools.product(preset.contexts, preset.batches)))


class CopyBandwidth:
    """Timer of memory bandwidth: passes in place over an array larger than any cache."""

    def __init__(self) -> None:
        self.nbytes = 2**28 if jax.default_backend() == "cpu" else 2**32
        self._array = jnp.ones(self.nbytes // 4, jnp.float32)

        # The number of passes is traced, so that XLA cannot merge them into one.
        def passes(x: jax.Array, count: jax.Array) -> jax.Array:
            return jax.lax.fori_loop(0, count, lambda _, x: 0.5 * x + 0.5, x)

        self._program = jax.jit(passes, donate_argnums=0)
        self.measure()

    def measure(self) -> float:
        """Return the bytes read and written per second."""
        return 2 * self.nbytes * COPIES / time_call(self._run)

    def _run(self) -> jax.Array:
        self._array = self._program(self._array, jnp.int32(COPIES))
        return self._array


def read_bytes(policy: Policy, params: PyTree) -> int:
    """Return the bytes of parameters that a round reads: all but an embedding that is not tied to the output layer."""
    total = sum(x.size for x in jax.tree.leaves(params))
    return policy.dtype.itemsize * (total - params["embed"]["embedding"].size if "head" in params else total)

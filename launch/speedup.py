"""The best speculative plan against the best autoregressive one, each at its own slot count, on the same prompts."""

import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

from configs.schema import SpeedupConfig
from configs.schema.networks import DraftConfig
from launch.errors import ConfigError
from launch.measure import in_turns
from launch.pipeline import PromptTable
from specjax.drafters import Drafter
from specjax.generate import make_generate, place
from specjax.keys import seed_step
from specjax.mesh import batch_shards
from specjax.plan import RolloutConfig, lay_out
from specjax.types import Params, Policy, Prompts

ANY_LENGTH = 2**30
TAIL = 4


@dataclass(frozen=True)
class Measurement:
    """One pass of a plan over all prompts.

    lengths: int32 [sequences]. alpha: tokens emitted a verification, live rows only.
    seconds: wall time. trips: rounds of the shard that had most.
    """

    lengths: np.ndarray
    alpha: float
    seconds: float
    trips: int

    @property
    def tokens_per_s(self) -> float:
        return float(self.lengths.sum()) / self.seconds

    @property
    def seconds_a_round(self) -> float:
        return self.seconds / max(self.trips, 1)


class Program:
    """All prompts generated with the same phases, at any draft length in any phase: compiled when made."""

    def __init__(
        self, policy: Policy, drafter: Drafter, params: Params, config: RolloutConfig, prompts: Prompts, mesh: Mesh
    ) -> None:
        sequences = len(prompts.lengths) // batch_shards(mesh)
        self.phases = lay_out(config, sequences, prompts.tokens.shape[1])
        self.draft_lengths = config.draft_lengths
        self._generate = make_generate(policy, drafter, config, mesh)
        self._params, self._prompts, self._everywhere = params, place(prompts, mesh), NamedSharding(mesh, P())
        self.measure((0,) * len(self.phases), 0)

    def measure(self, draft_lengths: tuple[int, ...], turn: int) -> Measurement:
        """Generate everything once, each phase at its draft length, with the noise of that turn."""
        chosen = jnp.array([self.draft_lengths.index(k) for k in draft_lengths])
        # Placed before the clock starts, as a train step's are.
        noise, chosen = jax.device_put((seed_step(0, -2 - turn), chosen), self._everywhere)
        start = time.perf_counter()
        rollout = jax.block_until_ready(self._generate(self._params, self._prompts, noise, chosen))
        seconds = time.perf_counter() - start
        lengths, rounds = np.asarray(rollout.lengths), int(np.sum(rollout.rounds))
        trips = int(np.max(np.sum(rollout.trips, axis=-1)))
        return Measurement(lengths, float(lengths.sum() - len(lengths)) / max(rounds, 1), seconds, trips)


@dataclass(frozen=True)
class Plan:
    """A program, run with a draft length for each of its phases."""

    program: Program
    draft_lengths: tuple[int, ...]

    def measure(self, turn: int) -> Measurement:
        return self.program.measure(self.draft_lengths, turn)


@dataclass(frozen=True)
class Speedup:
    """The two best plans over the same prompts, measured in turns; a turn has the same noise for both.

    speedup: median over the turns of the ratio of their tokens/s.
    cost:    seconds of a round of the speculative plan over those of an autoregressive one with the same phases.
    lengths: int [sequences], of the autoregressive completions of the first turn.
    """

    plain: Plan
    speculative: Plan
    plain_tokens_per_s: float
    speculative_tokens_per_s: float
    speedup: float
    alpha: float
    cost: float
    lengths: np.ndarray


def check_plans(options: SpeedupConfig, table: PromptTable, draft: DraftConfig, shards: int) -> None:
    """Raise ConfigError where plans of these options could not be made, or would not generate the same prompts."""
    if not options.slots:
        return
    if not draft.proposes:
        raise ConfigError(f"speedup.slots = {options.slots}: must be empty with draft.kind none")
    usable = len(table.rows)
    if options.prompts > usable:
        raise ConfigError(f"speedup.prompts = {options.prompts}: must be at most {usable}, the usable held-out prompts")
    if options.prompts % shards:
        raise ConfigError(
            f"speedup.prompts = {options.prompts}: must be a multiple of mesh.data x mesh.fsdp = {shards}"
        )


def shrinking(slots: int) -> tuple[tuple[int, int], ...]:
    """Phases of that many slots, a quarter, a sixteenth, .. down to four or less, of whatever length rows may have."""
    ladder = [slots]
    while ladder[-1] > 4:
        ladder.append(max(ladder[-1] // 4, 1))
    return tuple((count, ANY_LENGTH) for count in ladder)


def compare_plans(
    policy: Policy,
    drafter: Drafter,
    params: Params,
    config: RolloutConfig,
    table: PromptTable,
    options: SpeedupConfig,
    mesh: Mesh,
) -> tuple[Speedup, Speedup]:
    """The comparison over all prompts, and over the four alone that were longest: the tail, which all others wait for.

    (Of every shard as many, where there are several.)
    """
    config = replace(config, group_size=1, draft_lengths=(0, *sorted(set(options.draft_lengths))))
    # What a drafter remembers it knows by the ids of other prompts.
    params = replace(params, memory=())
    shards = batch_shards(mesh)

    def compare(rows: np.ndarray, slots: tuple[int, ...]) -> Speedup:
        prompts = table.batch(rows)
        programs = [
            Program(policy, drafter, params, replace(config, phases=shrinking(count)), prompts, mesh) for count in slots
        ]
        return _best_against_best(programs, options.repeats)

    everything = compare(np.arange(options.prompts), options.slots)
    each = min(-(-TAIL // shards), options.prompts // shards)
    parts = np.argsort(everything.lengths.reshape(shards, -1), axis=1)[:, -each:]
    tail = parts + np.arange(shards)[:, None] * (options.prompts // shards)
    return everything, compare(tail.ravel(), (each,))


def _best_against_best(programs: list[Program], repeats: int) -> Speedup:
    """Measure every plan once, then the best of each kind in turns, which cancels a drift of the machine."""
    measured: dict[Plan, Measurement] = {}
    for program in programs:
        # Drafts never grow shorter with the batch: the fewer the rows, the cheaper a longer verification.
        for lengths in itertools.combinations_with_replacement(program.draft_lengths, len(program.phases)):
            plan = Plan(program, lengths)
            measured[plan] = plan.measure(0)
    plain = {plan: seen for plan, seen in measured.items() if not any(plan.draft_lengths)}
    best_plain = max(plain, key=lambda plan: measured[plan].tokens_per_s)
    best = max(measured.keys() - plain.keys(), key=lambda plan: measured[plan].tokens_per_s)
    same_phases = next(plan for plan in plain if plan.program is best.program)
    names = {"plain": best_plain, "speculative": best, "same phases": same_phases}
    turns = in_turns({name: partial(_next_turn, plan, itertools.count()) for name, plan in names.items()}, repeats)
    a, b, c = turns.values()
    return Speedup(
        plain=best_plain,
        speculative=best,
        plain_tokens_per_s=statistics.median(x.tokens_per_s for x in a),
        speculative_tokens_per_s=statistics.median(x.tokens_per_s for x in b),
        speedup=statistics.median(y.tokens_per_s / x.tokens_per_s for x, y in zip(a, b, strict=True)),
        alpha=statistics.fmean(x.alpha for x in b),
        cost=statistics.median(y.seconds_a_round / x.seconds_a_round for x, y in zip(c, b, strict=True)),
        lengths=a[0].lengths,
    )


def _next_turn(plan: Plan, turns: Iterator[int]) -> Measurement:
    return plan.measure(next(turns))


def print_speedup(everything: Speedup, tail: Speedup, console: Console) -> None:
    """Both comparisons, each with what makes the difference between its plans."""
    for title, result in (("all prompts", everything), (f"the longest {len(tail.lengths)} alone", tail)):
        table = Table("plan", "slots", "k", "tokens/s", title=f"generation of {title}, best settings")
        table.title_justify = "left"
        for name, plan, speed in (
            ("autoregressive", result.plain, result.plain_tokens_per_s),
            ("speculative", result.speculative, result.speculative_tokens_per_s),
        ):
            slots = ", ".join(str(phase.slots) for phase in plan.program.phases)
            table.add_row(name, slots, ", ".join(map(str, plan.draft_lengths)), f"{speed:.0f}")
        console.print(table)
        console.print(
            f"speed-up {result.speedup:.2f}: alpha {result.alpha:.2f} tokens a round, which costs {result.cost:.2f} "
            f"autoregressive ones with the same slots (alpha / cost {result.alpha / result.cost:.2f})"
        )

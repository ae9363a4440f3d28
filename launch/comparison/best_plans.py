"""The best speculative plan against the best autoregressive one, each at its own slot count, on the same prompts.

Groups share their prompt's prefill as they do in a step, and every turn takes the next of the held-out prompts. What
is timed is the stage that the paper's table calls generation. Before it parameters are prepared, as in a step: a plan
would else find in the CPU's cache what the one before it left there, for which some have more use than others.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
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
from launch.cli.errors import ConfigError
from launch.data.batches import PromptTable
from launch.timing import in_turns, interval
from specjax.drafters import Drafter, NoDrafter
from specjax.keys import seed_step
from specjax.parallel.mesh import batch_shards, decoding_options
from specjax.rollout.generate import make_prepare, per_shard, place
from specjax.rollout.plan import RolloutConfig, lay_out
from specjax.rollout.speculative import speculative_rollout
from specjax.types import Params, Policy, Prompts

ANY_LENGTH = 2**30
TAIL = 4
# Turns by which plans are chosen, with other noise than those that are reported.
SCREENED = 8


@dataclass(frozen=True)
class Measurement:
    """One pass of a plan over the prompts of a turn.

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
    """The prompts of a turn generated with the same phases, at any draft length in any phase: compiled when made.

    prepared: the parameters that a rollout takes, made anew (specjax.rollout.generate.make_prepare).
    turns:    the prompts of each turn, all as many; behind the last comes the first.
    """

    def __init__(
        self,
        policy: Policy,
        drafter: Drafter,
        prepared: Callable[[], Params],
        config: RolloutConfig,
        turns: list[Prompts],
        mesh: Mesh,
    ) -> None:
        count, width = turns[0].tokens.shape
        self.phases = lay_out(config, count * config.group_size // batch_shards(mesh), width)
        self.draft_lengths = config.draft_lengths
        generate = per_shard(speculative_rollout, policy, drafter, config, mesh)
        self._generate = jax.jit(generate, compiler_options=decoding_options(policy.dtype))
        self._prepared, self._turns, self._mesh = prepared, turns, mesh
        self.measure((0,) * len(self.phases), 0)

    def measure(self, draft_lengths: tuple[int, ...], turn: int) -> Measurement:
        """Generate the prompts of that turn with its noise, each phase at its draft length."""
        chosen = jnp.array([self.draft_lengths.index(k) for k in draft_lengths])
        # Placed before the clock starts, as a train step's are.
        prompts = place(self._turns[turn % len(self._turns)], self._mesh)
        noise, chosen = jax.device_put((seed_step(0, -2 - turn), chosen), NamedSharding(self._mesh, P()))
        with jax.set_mesh(self._mesh):
            params = self._prepared()
            jax.block_until_ready((params, prompts, noise, chosen))
            start = time.perf_counter()
            rollout = jax.block_until_ready(self._generate(params, prompts, noise, chosen))
            seconds = time.perf_counter() - start
        lengths, rounds = np.asarray(rollout.lengths), int(np.sum(rollout.row_rounds))
        trips = int(np.max(np.sum(rollout.loop_rounds, axis=-1)))
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
    """The two best plans, measured in turns; a turn has the same prompts and noise for both.

    speedup: the ratio of their tokens/s, the median over the turns with its 95% interval.
    cost:    seconds of a round of the speculative plan over those of an autoregressive one with the same phases.
    lengths: int [turns, sequences], of the autoregressive completions.
    """

    plain: Plan
    speculative: Plan
    plain_tokens_per_s: float
    speculative_tokens_per_s: float
    speedup: tuple[float, float, float]
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
    """Phases of that many slots, half, a quarter, .. down to four or less, of whatever length rows may have."""
    ladder = [slots]
    while ladder[-1] > 4:
        ladder.append(ladder[-1] // 2)
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
    """The comparison of as many groups as `options` names, and of four sequences alone, as a tail leaves them.

    These are the first samples of the prompts whose groups were longest, of every shard as many.
    """
    # Draft length 0 is among them for phases before the last; plain plans hold no drafter, as a run without one.
    config = replace(config, draft_lengths=(0, *sorted(set(options.draft_lengths))))
    # What a drafter remembers it knows by the ids of other prompts.
    params = replace(params, memory=())
    undrafted, shards = replace(params, draft={}), batch_shards(mesh)
    prepared = partial(make_prepare(policy, drafter, params), params)
    prepared_alone = partial(make_prepare(policy, NoDrafter(), undrafted), undrafted)

    def compare(turns: np.ndarray, samples: int, slots: tuple[int, ...]) -> Speedup:
        prompts = [table.batch(rows) for rows in turns]
        made: dict[str, list[Program]] = {"plain": [], "drafting": []}
        for count in slots:
            groups = replace(config, group_size=samples, phases=shrinking(count))
            alone = replace(groups, draft_lengths=(0,)), prompts, mesh
            made["plain"].append(Program(policy, NoDrafter(), prepared_alone, *alone))
            made["drafting"].append(Program(policy, drafter, prepared, groups, prompts, mesh))
        return best_against_best(made["plain"], made["drafting"], options.repeats)

    turns = np.arange(options.repeats * options.prompts).reshape(options.repeats, -1) % len(table.rows)
    everything = compare(turns, config.group_size, options.slots)
    tail, samples = tail_of(turns, everything.lengths, shards, config.group_size)
    return everything, compare(tail, samples, (tail.shape[1] // shards * samples,))


def tail_of(turns: np.ndarray, lengths: np.ndarray, shards: int, group_size: int) -> tuple[np.ndarray, int]:
    """(the prompts of each turn whose groups were longest, as many of every shard; samples of each).

    turns: int [turns, prompts], in the order of the shards. lengths: int [turns, prompts * group_size].
    """
    sequences = -(-TAIL // shards)
    parts = turns.reshape(len(turns), shards, -1)
    count = min(-(-sequences // group_size), parts.shape[2])
    means = lengths.reshape(*parts.shape, group_size).mean(axis=-1)
    longest = np.argsort(means, axis=-1)[..., -count:]
    chosen = np.take_along_axis(parts, longest, axis=-1).reshape(len(turns), -1)
    return chosen, min(-(-sequences // count), group_size)


def best_against_best(plain: list[Program], drafting: list[Program], repeats: int) -> Speedup:
    """Measure every plan a few times, then the best of each kind; in turns, which cancels a drift of the machine.

    Both lists have the same phases, in the same order.
    """

    def best_of(plans: list[Plan]) -> Plan:
        if len(plans) == 1:
            return plans[0]
        runs = {plan: partial(_next_turn, plan, itertools.count(repeats)) for plan in plans}
        passes = in_turns(runs, SCREENED)
        # Of all its turns: which of a few is in the middle says more of their prompts than of the plan.
        return max(plans, key=lambda plan: _tokens_per_s(passes[plan]))

    plans = [
        Plan(program, lengths)
        for program in drafting
        # Drafts never grow shorter with the batch: the fewer the rows, the cheaper a longer verification.
        for lengths in itertools.combinations_with_replacement(program.draft_lengths, len(program.phases))
        if any(lengths)
    ]
    best, plain_plans = best_of(plans), [Plan(program, (0,) * len(program.phases)) for program in plain]
    best_plain, same_phases = best_of(plain_plans), plain_plans[drafting.index(best.program)]
    names = {"plain": best_plain, "speculative": best, "same phases": same_phases}
    turns = in_turns({name: partial(_next_turn, plan, itertools.count()) for name, plan in names.items()}, repeats)
    a, b, c = turns.values()
    return Speedup(
        plain=best_plain,
        speculative=best,
        plain_tokens_per_s=statistics.median(x.tokens_per_s for x in a),
        speculative_tokens_per_s=statistics.median(x.tokens_per_s for x in b),
        speedup=interval([y.tokens_per_s / x.tokens_per_s for x, y in zip(a, b, strict=True)]),
        alpha=statistics.fmean(x.alpha for x in b),
        cost=statistics.median(y.seconds_a_round / x.seconds_a_round for x, y in zip(c, b, strict=True)),
        lengths=np.stack([x.lengths for x in a]),
    )


def _tokens_per_s(passes: list[Measurement]) -> float:
    return sum(float(x.lengths.sum()) for x in passes) / sum(x.seconds for x in passes)


def _next_turn(plan: Plan, turns: Iterator[int]) -> Measurement:
    return plan.measure(next(turns))


def print_speedup(everything: Speedup, tail: Speedup, console: Console) -> None:
    """Both comparisons, each with what makes the difference between its plans."""
    for title, result in (
        (f"{everything.lengths.shape[1]} sequences", everything),
        (f"{tail.lengths.shape[1]} sequences alone, of the longest groups", tail),
    ):
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
            "speed-up {:.2f} [{:.2f}, {:.2f}]: ".format(*result.speedup)
            + f"alpha {result.alpha:.2f} tokens a round, which costs {result.cost:.2f} "
            f"autoregressive ones with the same slots (alpha / cost {result.alpha / result.cost:.2f})"
        )

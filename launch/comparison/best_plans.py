"""The best speculative plan against the best autoregressive one, each at its own slot count, on the same prompts.

Groups share their prompt's prefill as in a step, and every turn takes the next held-out prompts. Only the stage is
timed that the paper's table calls generation.
"""

import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from rich.console import Console
from rich.table import Table

from launch.build.experiment import Experiment
from launch.cli.errors import ConfigError
from launch.costs.rollout_timer import RolloutTime, RolloutTimer
from launch.timing import interleaved, interval
from specjax.drafters import Drafter, NoDrafter
from specjax.parallel.mesh import batch_shards
from specjax.rollout.generate import make_prepare, per_shard
from specjax.rollout.plan import RolloutConfig, lay_out
from specjax.types import Params, Prompts

ANY_LENGTH = 2**30
# Sequences in the tail comparison.
TAIL = 4
# Turns for choosing the best plans. Their noise differs from that of the reported turns.
SCREENED = 8


class PhasedRollout:
    """Generates the prompts of a turn in fixed phases, at any draft length in each, with one compiled program.

    prepared: returns the parameters for a rollout (specjax.rollout.generate.make_prepare).
    """

    def __init__(
        self,
        experiment: Experiment,
        drafter: Drafter,
        prepared: Callable[[], Params],
        config: RolloutConfig,
        turns: list[Prompts],
    ) -> None:
        (count, width), policy, mesh = turns[0].tokens.shape, experiment.networks.policy, experiment.mesh
        self.phases = lay_out(config, count * config.group_size // batch_shards(mesh), width)
        self.draft_lengths = config.draft_lengths
        generate = per_shard(experiment.rollout_fn, policy, drafter, config, mesh)
        self._timer = RolloutTimer(generate, policy, prepared, turns, mesh, np.zeros(len(self.phases), np.int32))

    def measure(self, draft_lengths: tuple[int, ...], turn: int) -> RolloutTime:
        """Time that turn's prompts and noise, each phase at its draft length."""
        return self._timer.measure(turn, np.array([self.draft_lengths.index(k) for k in draft_lengths], np.int32))


@dataclass(frozen=True)
class Plan:
    """A rollout with a draft length for each of its phases."""

    rollout: PhasedRollout
    draft_lengths: tuple[int, ...]

    def next_turns(self, first: int) -> Callable[[], RolloutTime]:
        """Return a function that times the next turn at each call, starting with turn `first`."""
        turns: Iterator[int] = itertools.count(first)
        return lambda: self.rollout.measure(self.draft_lengths, next(turns))


@dataclass(frozen=True)
class Speedup:
    """The two best plans, measured in turns; a turn has the same prompts and noise for both.

    speedup:            the ratio of their tokens/s: median over the turns, and 95% interval.
    acceptance_length:  of the speculative plan.
    cost:               seconds of a round of the speculative plan over those of an autoregressive one with its phases.
    lengths:            int [turns, sequences], of the autoregressive completions.
    """

    plain: Plan
    speculative: Plan
    plain_tokens_per_s: float
    speculative_tokens_per_s: float
    speedup: tuple[float, float, float]
    acceptance_length: float
    cost: float
    lengths: np.ndarray


def check_plans(experiment: Experiment) -> None:
    """Raise ConfigError if plans of the run's options cannot be made, or would not generate the same prompts."""
    options, draft = experiment.config.speedup, experiment.config.draft
    table, shards = experiment.held_out_prompts, batch_shards(experiment.mesh)
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
    if experiment.config.rollout.function is not None:
        group_size = experiment.config.rollout.group_size
        count, few = _tail_size(options.prompts // shards, shards, group_size)
        plans = [(options.prompts, group_size, slots) for slots in options.slots]
        try:
            for prompts, samples, slots in [*plans, (count * shards, few, count * few)]:
                experiment.trace_rollout(replace(_plan_config(experiment, slots), group_size=samples), prompts)
        except ConfigError as error:
            raise ConfigError(f"speedup.slots = {options.slots}: {error}") from error


def _plan_config(experiment: Experiment, slots: int) -> RolloutConfig:
    # Draft length 0 is among them for phases before the last.
    lengths = (0, *sorted(set(experiment.config.speedup.draft_lengths)))
    return replace(experiment.config.rollout, draft_lengths=lengths, phases=shrinking(slots))


def shrinking(slots: int) -> tuple[tuple[int, int], ...]:
    """Return phases of that many slots, half, a quarter, .. down to four or less, for rows of any length."""
    ladder = [slots]
    while ladder[-1] > 4:
        ladder.append(ladder[-1] // 2)
    return tuple((count, ANY_LENGTH) for count in ladder)


def compare_plans(experiment: Experiment, params: Params) -> tuple[Speedup, Speedup]:
    """Compare the plans that the run's speedup section names: on all its groups, and on a tail of four sequences.

    The tail is what a step leaves at its end: the first samples of the prompts whose groups were longest, equally many
    of every shard.
    """
    options, dtype, drafter = experiment.config.speedup, experiment.networks.policy.dtype, experiment.networks.drafter
    table, shards = experiment.held_out_prompts, batch_shards(experiment.mesh)
    # What a drafter remembers it knows by the ids of other prompts.
    params = replace(params, memory=())
    undrafted = replace(params, draft={})
    prepared = partial(make_prepare(params, dtype), params)
    prepared_alone = partial(make_prepare(undrafted, dtype), undrafted)

    def compare(turns: np.ndarray, samples: int, slots: tuple[int, ...]) -> Speedup:
        prompts = [table.batch(rows) for rows in turns]
        plain, drafting = [], []
        for count in slots:
            groups = replace(_plan_config(experiment, count), group_size=samples)
            # Plain plans hold no drafter, as a run without one.
            alone = replace(groups, draft_lengths=(0,))
            plain.append(PhasedRollout(experiment, NoDrafter(), prepared_alone, alone, prompts))
            drafting.append(PhasedRollout(experiment, drafter, prepared, groups, prompts))
        return best_against_best(plain, drafting, options.repeats)

    turns = np.arange(options.repeats * options.prompts).reshape(options.repeats, -1) % len(table.rows)
    group_size = experiment.config.rollout.group_size
    everything = compare(turns, group_size, options.slots)
    tail, samples = tail_of(turns, everything.lengths, shards, group_size)
    return everything, compare(tail, samples, (tail.shape[1] // shards * samples,))


def tail_of(turns: np.ndarray, lengths: np.ndarray, shards: int, group_size: int) -> tuple[np.ndarray, int]:
    """Return the prompts of each turn whose groups were longest, equally many of every shard, and samples of each.

    turns: int [turns, prompts], in the order of the shards. lengths: int [turns, prompts * group_size].
    """
    parts = turns.reshape(len(turns), shards, -1)
    count, samples = _tail_size(parts.shape[2], shards, group_size)
    means = lengths.reshape(*parts.shape, group_size).mean(axis=-1)
    longest = np.argsort(means, axis=-1)[..., -count:]
    chosen = np.take_along_axis(parts, longest, axis=-1).reshape(len(turns), -1)
    return chosen, samples


def _tail_size(prompts: int, shards: int, group_size: int) -> tuple[int, int]:
    """Return the prompts of each shard's tail and the samples of each; prompts: those of a shard."""
    sequences = -(-TAIL // shards)
    count = min(-(-sequences // group_size), prompts)
    return count, min(-(-sequences // count), group_size)


def best_against_best(plain: list[PhasedRollout], drafting: list[PhasedRollout], repeats: int) -> Speedup:
    """Choose the best plan of each kind by a few turns, then compare both in turns, which cancels a machine's drift.

    Both lists have the same phases, in the same order.
    """

    def best_of(plans: list[Plan]) -> Plan:
        if len(plans) == 1:
            return plans[0]
        times = interleaved({plan: plan.next_turns(repeats) for plan in plans}, SCREENED)
        # By the sum over all turns: the median of a few says more of their prompts than of the plan.
        return max(
            plans, key=lambda plan: sum(x.lengths.sum() for x in times[plan]) / sum(x.seconds for x in times[plan])
        )

    plans = [
        Plan(rollout, lengths)
        for rollout in drafting
        # Drafts never grow shorter with the batch: the fewer the rows, the cheaper a longer verification.
        for lengths in itertools.combinations_with_replacement(rollout.draft_lengths, len(rollout.phases))
        if any(lengths)
    ]
    best, plain_plans = best_of(plans), [Plan(rollout, (0,) * len(rollout.phases)) for rollout in plain]
    best_plain, same_phases = best_of(plain_plans), plain_plans[drafting.index(best.rollout)]
    compared = {"plain": best_plain, "speculative": best, "same phases": same_phases}
    a, b, c = interleaved({name: plan.next_turns(0) for name, plan in compared.items()}, repeats).values()
    return Speedup(
        plain=best_plain,
        speculative=best,
        plain_tokens_per_s=statistics.median(x.tokens_per_s for x in a),
        speculative_tokens_per_s=statistics.median(x.tokens_per_s for x in b),
        speedup=interval([y.tokens_per_s / x.tokens_per_s for x, y in zip(a, b, strict=True)]),
        acceptance_length=statistics.fmean(x.acceptance_length for x in b),
        cost=statistics.median(y.seconds_per_round / x.seconds_per_round for x, y in zip(c, b, strict=True)),
        lengths=np.stack([x.lengths for x in a]),
    )


def print_speedup(everything: Speedup, tail: Speedup, console: Console) -> None:
    """Print both comparisons, each with what makes the difference between its plans."""
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
            slots = ", ".join(str(phase.slots) for phase in plan.rollout.phases)
            table.add_row(name, slots, ", ".join(map(str, plan.draft_lengths)), f"{speed:.0f}")
        console.print(table)
        alpha, cost = result.acceptance_length, result.cost
        console.print(
            "speed-up {:.2f} [{:.2f}, {:.2f}]: ".format(*result.speedup)
            + f"alpha {alpha:.2f} tokens a round, which costs {cost:.2f} "
            f"autoregressive ones with the same slots (alpha / cost {alpha / cost:.2f})"
        )

"""Comparison of the best speculative plan with the best autoregressive plan, each at its own slot count.

Both plans generate the same held-out prompts, new ones in each turn. As in a training step, the samples of a
prompt share its prefill. Only generation is timed, as in the paper's table (arXiv 2604.26779).
"""

import itertools
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from rich.console import Console
from rich.table import Table

from launch.build.experiment import Experiment
from launch.cli.errors import ConfigError
from launch.cli.unfinished import Unfinished
from launch.costs.rollout_timer import RolloutTime, RolloutTimer
from launch.costs.turns import Record, timed_turns
from launch.timing import interval
from specjax.drafters import Drafter, NoDrafter
from specjax.parallel.mesh import batch_shards
from specjax.rollout.generate import make_prepare, per_shard
from specjax.rollout.plan import RolloutConfig, lay_out
from specjax.types import Params, Prompts

# Window of a phase for rows of any length.
ANY_LENGTH = 2**30
# Sequences in the tail comparison.
TAIL = 4
# Turns for choosing the best plans. Their noise differs from that of the reported turns, which avoids selection bias.
SCREENED = 8


class PhasedRollout:
    """Timer of rollouts in fixed phases. One compiled program serves every choice of a draft length per phase.

    prepared: returns the parameters for a rollout (specjax.rollout.generate.make_prepare).
    turns:    prompts of each turn, all of one shape.
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
        """Time the rollout of a turn. draft_lengths: one per phase."""
        return self._timer.measure(turn, np.array([self.draft_lengths.index(k) for k in draft_lengths], np.int32))


@dataclass(frozen=True)
class Plan:
    """A phased rollout and the draft length of each phase."""

    rollout: PhasedRollout
    draft_lengths: tuple[int, ...]

    def measure(self, turn: int) -> RolloutTime:
        """Time the rollout of a turn."""
        return self.rollout.measure(self.draft_lengths, turn)


@dataclass(frozen=True)
class Speedup:
    """The two best plans and their speeds. In each turn, both have the same prompts and noise.

    Attributes:
        plain:                    the best autoregressive plan.
        speculative:              the best speculative plan.
        plain_tokens_per_s:       median over the turns.
        speculative_tokens_per_s: median over the turns.
        speedup:                  speculative over autoregressive tokens/s: median over the turns, 95% interval.
        acceptance_length:        mean over the turns, of the speculative plan.
        cost:                     seconds of a speculative round over those of an autoregressive round in the same
                                  phases: median over the turns.
        lengths:                  int [turns, sequences], tokens of the autoregressive completions.
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
    """Raise ConfigError if the plans of the run's speedup section cannot be compared."""
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
        shard_prompts, tail_samples = _tail_size(options.prompts // shards, shards, group_size)
        tail_prompts = shard_prompts * shards
        plans = [(options.prompts, group_size, slots) for slots in options.slots]
        try:
            for prompts, samples, slots in [*plans, (tail_prompts, tail_samples, shard_prompts * tail_samples)]:
                plan = replace(_plan_config(experiment, slots), group_size=samples)
                experiment.trace_rollout(plan, prompts, experiment.mesh)
        except ConfigError as error:
            raise ConfigError(f"speedup.slots = {options.slots}: {error}") from error


def _plan_config(experiment: Experiment, slots: int) -> RolloutConfig:
    # Phases before the last may decode at draft length 0.
    lengths = (0, *sorted(set(experiment.config.speedup.draft_lengths)))
    whole = replace(experiment.config.rollout, carry_over=None, max_age=None)
    return replace(whole, draft_lengths=lengths, phases=shrinking(slots))


def shrinking(slots: int) -> tuple[tuple[int, int], ...]:
    """Return phases (slots, window) that halve the slots until at most four are left, for rows of any length."""
    slot_counts = [slots]
    while slot_counts[-1] > 4:
        slot_counts.append(slot_counts[-1] // 2)
    return tuple((count, ANY_LENGTH) for count in slot_counts)


def compare_plans(experiment: Experiment, params: Params, unfinished: Unfinished) -> tuple[Speedup, Speedup]:
    """Compare the plans of the run's speedup section, first on all its groups, then on a tail of few sequences.

    The tail imitates the end of a rollout, where only long rows are still active: about TAIL sequences of the prompts
    with the longest completions (`tail_of`).
    """
    options, policy, drafter = experiment.config.speedup, experiment.networks.policy, experiment.networks.drafter
    table, shards = experiment.held_out_prompts, batch_shards(experiment.mesh)
    # The drafter's memory is keyed by ids of training prompts; held-out prompts reuse these ids.
    params = replace(params, memory=())
    policy_params = replace(params, draft={})
    prepare_all = partial(make_prepare(policy, drafter, params), params)
    prepare_policy = partial(make_prepare(policy, NoDrafter(), policy_params), policy_params)

    def compare(name: str, turns: np.ndarray, samples: int, slots: tuple[int, ...]) -> Speedup:
        prompts = [table.batch(rows) for rows in turns]
        plain, drafting = [], []
        with unfinished.phase(f"compiling of plans, {name}", 2 * len(slots), "programs", kept=False) as phase:
            for count in slots:
                config = replace(_plan_config(experiment, count), group_size=samples)
                # An autoregressive plan has no drafter state, like a run without a draft.
                plain_config = replace(config, draft_lengths=(0,))
                plain.append(PhasedRollout(experiment, NoDrafter(), prepare_policy, plain_config, prompts))
                phase.finish()
                drafting.append(PhasedRollout(experiment, drafter, prepare_all, config, prompts))
                phase.finish()
        return best_against_best(plain, drafting, options.repeats, unfinished, name)

    turns = np.arange(options.repeats * options.prompts).reshape(options.repeats, -1) % len(table.rows)
    group_size = experiment.config.rollout.group_size
    everything = compare("all", turns, group_size, options.slots)
    tail, samples = tail_of(turns, everything.lengths, shards, group_size)
    return everything, compare("tail", tail, samples, (tail.shape[1] // shards * samples,))


def tail_of(turns: np.ndarray, lengths: np.ndarray, shards: int, group_size: int) -> tuple[np.ndarray, int]:
    """Return the prompts with the longest completions, [turns, tail prompts], and the number of samples of each.

    Every shard contributes equally many prompts.

    turns:   int [turns, prompts], prompts in the order of the shards.
    lengths: int [turns, prompts * group_size], completion lengths.
    """
    by_shard = turns.reshape(len(turns), shards, -1)
    count, samples = _tail_size(by_shard.shape[2], shards, group_size)
    mean_lengths = lengths.reshape(*by_shard.shape, group_size).mean(axis=-1)
    longest = np.argsort(mean_lengths, axis=-1)[..., -count:]
    chosen = np.take_along_axis(by_shard, longest, axis=-1).reshape(len(turns), -1)
    return chosen, samples


def _tail_size(prompts: int, shards: int, group_size: int) -> tuple[int, int]:
    """Return the number of tail prompts per shard and of samples per prompt. prompts: number per shard."""
    sequences = -(-TAIL // shards)
    count = min(-(-sequences // group_size), prompts)
    return count, min(-(-sequences // count), group_size)


def best_against_best(
    plain: list[PhasedRollout],
    drafting: list[PhasedRollout],
    repeats: int,
    unfinished: Unfinished,
    name: str = "all",
) -> Speedup:
    """Choose the best plan of each kind in SCREENED turns, then compare the two in `repeats` interleaved turns.

    plain, drafting: rollouts with the same phases, in the same order.
    name:            name of the set of sequences, for progress lines.
    """

    def measure(what: str, plans: dict[str, Plan], first: int, turns: int) -> dict[str, list[RolloutTime]]:
        runs = {each: lambda turn, run=plan.measure: run(first + turn) for each, plan in plans.items()}
        records = timed_turns(unfinished.phase(f"{what}, {name}", turns, "turns"), runs, _records)
        return {each: [RolloutTime.from_json(record[each]) for record in records] for each in plans}

    def best_of(kind: str, plans: list[Plan]) -> Plan:
        if len(plans) == 1:
            return plans[0]
        numbered = {str(number): plan for number, plan in enumerate(plans)}
        times = measure(f"choice of {len(plans)} {kind} plans", numbered, repeats, SCREENED)
        # Total tokens over total seconds: a median of few turns depends more on the prompts than on the plan.
        speeds = {
            number: sum(time.lengths.sum() for time in measured) / sum(time.seconds for time in measured)
            for number, measured in times.items()
        }
        return numbered[max(speeds, key=lambda number: speeds[number])]

    plans = [
        Plan(rollout, lengths)
        for rollout in drafting
        # Only ascending draft lengths: the fewer rows a phase has, the cheaper a longer verification is.
        for lengths in itertools.combinations_with_replacement(rollout.draft_lengths, len(rollout.phases))
        if any(lengths)
    ]
    best, plain_plans = best_of("speculative", plans), [Plan(rollout, (0,) * len(rollout.phases)) for rollout in plain]
    best_plain, same_phases = best_of("autoregressive", plain_plans), plain_plans[drafting.index(best.rollout)]
    compared = {"plain": best_plain, "speculative": best, "same phases": same_phases}
    times = measure("comparison of the best plans", compared, 0, repeats)
    plain_times, speculative_times, same_phases_times = times.values()
    speedups = [b.tokens_per_s / a.tokens_per_s for a, b in zip(plain_times, speculative_times, strict=True)]
    costs = [
        b.seconds_per_round / a.seconds_per_round for a, b in zip(same_phases_times, speculative_times, strict=True)
    ]
    return Speedup(
        plain=best_plain,
        speculative=best,
        plain_tokens_per_s=statistics.median(time.tokens_per_s for time in plain_times),
        speculative_tokens_per_s=statistics.median(time.tokens_per_s for time in speculative_times),
        speedup=interval(speedups),
        acceptance_length=statistics.fmean(time.acceptance_length for time in speculative_times),
        cost=statistics.median(costs),
        lengths=np.stack([time.lengths for time in plain_times]),
    )


def _records(times: Mapping[str, RolloutTime]) -> Record:
    return {name: time.to_json() for name, time in times.items()}


def print_speedup(everything: Speedup, tail: Speedup, console: Console) -> None:
    """Print both comparisons: plans, tokens/s, speed-up, acceptance length and the cost of a round."""
    for title, result in (
        (f"{everything.lengths.shape[1]} sequences", everything),
        (f"{tail.lengths.shape[1]} sequences of the longest groups (tail)", tail),
    ):
        table = Table("plan", "slots", "k", "tokens/s", title=f"generation of {title}, best plans")
        table.title_justify = "left"
        for name, plan, speed in (
            ("autoregressive", result.plain, result.plain_tokens_per_s),
            ("speculative", result.speculative, result.speculative_tokens_per_s),
        ):
            slots = ", ".join(str(phase.slots) for phase in plan.rollout.phases)
            table.add_row(name, slots, ", ".join(map(str, plan.draft_lengths)), f"{speed:.0f}")
        console.print(table)
        acceptance_length, cost = result.acceptance_length, result.cost
        console.print(
            "speed-up {:.2f} [{:.2f}, {:.2f}]: ".format(*result.speedup)
            + f"acceptance length {acceptance_length:.2f}; a round costs as much as {cost:.2f} autoregressive rounds "
            f"with the same slots; acceptance length / cost = {acceptance_length / cost:.2f}"
        )

"""The best speculative plan against the best autoregressive one, each at its own slot count, on the same prompts."""

import itertools
import statistics
import time
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from configs.schema import DraftConfig, SpeedupConfig
from launch.errors import ConfigError
from launch.pipeline import PromptTable
from specjax.drafters import Drafter
from specjax.generate import make_generate, place
from specjax.mesh import batch_shards
from specjax.plan import Phase, RolloutConfig, lay_out
from specjax.types import Params, Policy, Prompts

ANY_LENGTH = 2**30


@dataclass(frozen=True)
class Measurement:
    """One pass of a plan over all prompts.

    alpha:   tokens emitted a verification, live rows only.
    seconds: wall time. trips: rounds of the shard that had most.
    """

    tokens: int
    alpha: float
    seconds: float
    trips: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class Program:
    """All prompts generated with the same phases, at any draft length in any phase: compiled when made."""

    def __init__(
        self, policy: Policy, drafter: Drafter, params: Params, config: RolloutConfig, prompts: Prompts, mesh: Mesh
    ) -> None:
        sequences = len(prompts.lengths) // batch_shards(mesh)
        self.phases = lay_out(config, sequences, prompts.tokens.shape[1])
        self.draft_lengths = config.draft_lengths
        self._generate = make_generate(policy, drafter, config, mesh)
        self._params, self._prompts = params, place(prompts, mesh)
        self.measure((0,) * len(self.phases))

    def measure(self, draft_lengths: tuple[int, ...]) -> Measurement:
        """Generate everything once, each phase at its draft length."""
        chosen = jnp.array([self.draft_lengths.index(k) for k in draft_lengths])
        noise = jnp.int32(0), jnp.int32(-2)
        start = time.perf_counter()
        rollout = jax.block_until_ready(self._generate(self._params, self._prompts, noise, chosen))
        seconds = time.perf_counter() - start
        tokens, rounds = int(rollout.lengths.sum()), int(np.sum(rollout.rounds))
        trips = int(np.max(np.sum(rollout.trips, axis=-1)))
        return Measurement(tokens, (tokens - len(rollout.lengths)) / max(rounds, 1), seconds, trips)


@dataclass(frozen=True)
class Plan:
    """A program, run with a draft length for each of its phases."""

    program: Program
    draft_lengths: tuple[int, ...]

    @property
    def slots(self) -> int:
        return self.program.phases[0].slots

    def measure(self) -> Measurement:
        return self.program.measure(self.draft_lengths)


@dataclass(frozen=True)
class Speedup:
    """The two best plans measured in turns. speedup: median over the turns of the ratio of their tokens/s.

    cost: seconds of a round of the speculative plan over those of an autoregressive one with the same phases.
    """

    plain: Plan
    speculative: Plan
    plain_tokens_per_s: float
    speculative_tokens_per_s: float
    speedup: float
    alpha: float
    cost: float


def check_plans(options: SpeedupConfig, table: PromptTable, draft: DraftConfig, shards: int) -> None:
    """Raise ConfigError where plans of these options could not be made, or would not generate the same prompts."""
    if not options.slots:
        return
    if draft.kind == "none":
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
) -> Speedup:
    """Measure every plan once, then the best of each kind in turns, which cancels a drift of the machine."""
    prompts = table.batch(np.arange(options.prompts))
    config = replace(config, group_size=1, draft_lengths=(0, *sorted(set(options.draft_lengths))))
    measured: dict[Plan, Measurement] = {}
    for slots in options.slots:
        program = Program(policy, drafter, params, replace(config, phases=shrinking(slots)), prompts, mesh)
        # Drafts never grow shorter with the batch: the fewer the rows, the cheaper a longer verification.
        for lengths in itertools.combinations_with_replacement(config.draft_lengths, len(program.phases)):
            plan = Plan(program, lengths)
            measured[plan] = plan.measure()
    plain = {plan: seen for plan, seen in measured.items() if not any(plan.draft_lengths)}
    best_plain = max(plain, key=lambda plan: measured[plan].tokens_per_s)
    best = max(measured.keys() - plain.keys(), key=lambda plan: measured[plan].tokens_per_s)
    same_phases = next(plan for plan in plain if plan.program is best.program)
    turns = [(best_plain.measure(), best.measure(), same_phases.measure()) for _ in range(options.repeats)]
    return Speedup(
        plain=best_plain,
        speculative=best,
        plain_tokens_per_s=statistics.median(a.tokens_per_s for a, _, _ in turns),
        speculative_tokens_per_s=statistics.median(b.tokens_per_s for _, b, _ in turns),
        speedup=statistics.median(b.tokens_per_s / a.tokens_per_s for a, b, _ in turns),
        alpha=turns[0][1].alpha,
        cost=statistics.median((b.seconds / b.trips) / (c.seconds / c.trips) for _, b, c in turns),
    )


def print_speedup(result: Speedup, console: Console) -> None:
    """Both plans, and what makes the difference between them."""
    table = Table("plan", "slots", "k", "tokens/s", title="generation, each at its best setting", title_justify="left")
    for name, plan, speed in (
        ("autoregressive", result.plain, result.plain_tokens_per_s),
        ("speculative", result.speculative, result.speculative_tokens_per_s),
    ):
        phases: tuple[Phase, ...] = plan.program.phases
        table.add_row(
            name, ", ".join(str(p.slots) for p in phases), ", ".join(map(str, plan.draft_lengths)), f"{speed:.0f}"
        )
    console.print(table)
    console.print(
        f"speed-up {result.speedup:.2f}: alpha {result.alpha:.2f} tokens a round, which costs {result.cost:.2f} "
        f"autoregressive ones in the same phases (alpha / cost {result.alpha / result.cost:.2f})"
    )

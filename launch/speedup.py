"""The best speculative plan against the best autoregressive one, each at its own slot count, on the same prompts."""

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
from specjax.plan import RolloutConfig
from specjax.types import Params, Policy, Prompts


@dataclass(frozen=True)
class Measurement:
    """One pass of a plan over all prompts.

    alpha:   tokens emitted a verification, live rows only.
    seconds: wall time. trips: iterations of the decoding loop.
    """

    tokens: int
    alpha: float
    seconds: float
    trips: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class Plan:
    """Prompts generated `slots` at a time at one draft length; compiled when made."""

    def __init__(
        self,
        policy: Policy,
        drafter: Drafter,
        params: Params,
        config: RolloutConfig,
        table: PromptTable,
        prompts: int,
        slots: int,
        draft_length: int,
        mesh: Mesh,
    ) -> None:
        self.slots, self.draft_length = slots, draft_length
        config = replace(config, group_size=1, draft_length=draft_length)
        self._generate = make_generate(policy, drafter, config, mesh)
        self._params = params
        self._batches: list[Prompts] = [
            place(table.batch(np.arange(start, start + slots)), mesh) for start in range(0, prompts, slots)
        ]
        self.measure()

    def measure(self) -> Measurement:
        """Generate everything once."""
        start = time.perf_counter()
        noise = jnp.int32(0), jnp.int32(-2)
        rollouts = jax.block_until_ready([self._generate(self._params, batch, noise) for batch in self._batches])
        seconds = time.perf_counter() - start
        tokens = sum(int(rollout.lengths.sum()) for rollout in rollouts)
        rows = sum(len(rollout.lengths) for rollout in rollouts)
        verifications = sum(int(np.sum(np.asarray(rollout.rounds))) for rollout in rollouts)
        trips = sum(int(np.max(np.sum(rollout.trips, axis=-1))) for rollout in rollouts)
        return Measurement(tokens, (tokens - rows) / max(verifications, 1), seconds, trips)


@dataclass(frozen=True)
class Speedup:
    """The two best plans measured in turns. speedup: median over the turns of the ratio of their tokens/s.

    cost: seconds of a round of the speculative plan over those of an autoregressive one at the same slots.
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
    for slots in options.slots:
        if options.prompts % slots or slots % shards:
            raise ConfigError(
                f"speedup.slots = {options.slots}: each must divide speedup.prompts = {options.prompts} "
                f"and be a multiple of mesh.data x mesh.fsdp = {shards}"
            )


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

    def sweep(draft_lengths: tuple[int, ...]) -> dict[Plan, Measurement]:
        plans = [
            Plan(policy, drafter, params, config, table, options.prompts, slots, draft_length, mesh)
            for slots in options.slots
            for draft_length in draft_lengths
        ]
        return {plan: plan.measure() for plan in plans}

    plain, speculative = sweep((0,)), sweep(options.draft_lengths)
    best_plain = max(plain, key=lambda plan: plain[plan].tokens_per_s)
    best = max(speculative, key=lambda plan: speculative[plan].tokens_per_s)
    same_slots = next(plan for plan in plain if plan.slots == best.slots)
    turns = [(best_plain.measure(), best.measure(), same_slots.measure()) for _ in range(options.repeats)]
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
        table.add_row(name, str(plan.slots), str(plan.draft_length), f"{speed:.0f}")
    console.print(table)
    console.print(
        f"speed-up {result.speedup:.2f}: alpha {result.alpha:.2f} tokens a round, which costs {result.cost:.2f} "
        f"autoregressive ones at the same slots (alpha / cost {result.alpha / result.cost:.2f})"
    )

"""Whole completions as one compiled program, and the section on speed-up by draft length and acceptance."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from launch.bench.models import Networks, compiled, random_prompts
from launch.bench.presets import LongTail, Preset
from launch.bench.report import Row, Section, ratio
from launch.bench.rounds import NO_ROOM, where_it_fits
from launch.bench.stubs import forced_rollout
from launch.costs.rollout_timer import RolloutTime
from launch.timing import in_turns
from specjax.drafters import NoDrafter
from specjax.keys import seed_step
from specjax.rollout.plan import RolloutConfig
from specjax.rollout.speculative import speculative_rollout
from specjax.types import Params, Prompts, Rollout

NOTES = (
    "alpha: tokens a verification, live rows only; cost: seconds of a round in autoregressive ones",
    "whole completions, with their prefill, in turns with autoregressive decoding",
)


class Generation:
    """All completions of some prompts: compiled when made.

    Where `forced`, a drafted token is kept at the rate that each call gives, and with a `tail` completions have its
    lengths; else sampling is as in training.
    """

    def __init__(
        self,
        networks: Networks,
        prompts: Prompts,
        config: RolloutConfig,
        forced: bool = True,
        tail: LongTail | None = None,
    ) -> None:
        drafter = networks.drafter if max(config.lengths) else NoDrafter()

        def generate(params: Params, prompts: Prompts, rate: jax.Array) -> Rollout:
            rollout = partial(forced_rollout, rate=rate, tail=tail) if forced else speculative_rollout
            return rollout(networks.policy, drafter, params, prompts, seed_step(0, 0), config)

        self._params, self._prompts = networks.params, prompts
        self._program, self.compile_seconds = compiled(networks, generate, networks.params, prompts, jnp.float32(0))
        self.generate()

    def generate(self, rate: float = 0.0, prompts: Prompts | None = None) -> Rollout:
        """The completions of these prompts, or of others of the same shape."""
        args = self._params, self._prompts if prompts is None else prompts, jnp.float32(rate)
        return jax.block_until_ready(self._program(*args))

    def measure(self, rate: float = 0.0) -> RolloutTime:
        start = time.perf_counter()
        rollout = self.generate(rate)
        taken = time.perf_counter() - start
        assert rollout.row_rounds is not None and rollout.loop_rounds is not None
        lengths, verifications = np.asarray(rollout.lengths), int(jnp.sum(rollout.row_rounds))
        alpha = (lengths.sum() - len(lengths)) / max(verifications, 1)
        return RolloutTime(lengths, float(alpha), taken, int(jnp.sum(rollout.loop_rounds)))


def acceptance(networks: Networks, preset: Preset) -> Section:
    """Speed-up over autoregressive decoding where a drafted token is accepted with a given chance."""
    prompts = random_prompts(networks, preset.batch, preset.prompt)
    title = f"speed-up at forced acceptance, batch {preset.batch}, {preset.prompt} + {preset.new} tokens"
    note = "forced: the draft head's work and the verifier's are done in full, but the law is not kept"
    config = RolloutConfig(group_size=1, max_new_tokens=preset.new)
    rows = where_it_fits({"k": None}, partial(speedups, networks, prompts, preset, config, preset.rates))
    return Section(title, rows, [note, *NOTES, NO_ROOM])


def speedups(
    networks: Networks, prompts: Prompts, preset: Preset, config: RolloutConfig, rates: Sequence[float] | None
) -> list[Row]:
    """A row for each draft length and rate, measured in turns with autoregressive decoding.

    Where rates are None, sampling is as in training, and acceptance the drafter's own.
    """
    plain = Generation(networks, prompts, replace(config, draft_length=0), forced=False)
    runs: dict[tuple[int, float | None], Callable[[], RolloutTime]] = {(0, None): plain.measure}
    compile_seconds = {}
    for k in preset.draft_lengths:
        program = Generation(networks, prompts, replace(config, draft_length=k), forced=rates is not None)
        compile_seconds[k] = program.compile_seconds
        runs |= {(k, rate): partial(program.measure, rate or 0.0) for rate in rates or (None,)}
    measured = in_turns(runs, preset.repeats)
    base = measured.pop((0, None))
    rows = []
    for (k, rate), seen in measured.items():
        alpha = seen[0].acceptance_length
        cost = ratio([x.seconds_per_round for x in seen], [x.seconds_per_round for x in base])
        rows.append({
            "k": k,
            "rate": rate,
            "alpha": alpha,
            "cost": cost,
            "alpha/cost": alpha / cost[0],
            "tokens/s": statistics.median(x.tokens_per_s for x in seen),
            "speed-up": ratio([x.tokens_per_s for x in seen], [x.tokens_per_s for x in base]),
            "compile s": compile_seconds[k],
        })  # fmt: skip
    return rows

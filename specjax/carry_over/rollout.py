"""Rollouts that go on with sequences of earlier rollouts, and end once enough groups are finished.

Finished sequences keep their rows. An unfinished one needs one forward over its prompt and tokens, under the networks
of this rollout. It is then decoded as any other, so that the drafters need not know. Its next tokens follow the law of
these networks after its prefix. Their noise is keyed by the step in which it began: with `coupled`, under networks that
do not change, it is the sequence that one rollout would have written.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

from specjax import cache as kv
from specjax.carry_over.groups import begun_sequences, where_rows, with_history
from specjax.drafters import Drafter
from specjax.keys import SeedStep, sequence_keys
from specjax.rollout.admission import Carry, next_token, prefill
from specjax.rollout.generate import Choice, Generate, RolloutFn
from specjax.rollout.phase import PhaseRun
from specjax.rollout.plan import RolloutConfig
from specjax.rollout.rounds import Decoding, RoundState
from specjax.rollout.speculative import run_phases, speculative_rollout, start_rollout
from specjax.types import CarryOver, Params, Policy, Prompts, Rollout


def carry_over_fn(rollout_fn: RolloutFn) -> RolloutFn:
    """Return the rollout function of steps with carry-over. One of your own must itself go on with what is carried."""
    return carry_over_rollout if rollout_fn is speculative_rollout else rollout_fn


def carry_over(generate: Generate, carried: CarryOver, version: Int[Array, ""]) -> Generate:
    """Return the function `generate`, but its rollouts go on with the carried groups.

    version: number of updates that the policy has seen.
    """

    def run(params: Params, prompts: Prompts, seed_step: SeedStep, chosen: Choice) -> Rollout:
        begun = begun_sequences(prompts, carried)
        rollout = generate(params, replace(prompts, carried=begun), seed_step, chosen)
        return with_history(rollout, begun, seed_step[1], version)

    return run


def carry_over_rollout(
    policy: Policy, drafter: Drafter, params: Params, prompts: Prompts, seed_step: SeedStep, config: RolloutConfig
) -> Rollout:
    """Run `speculative_rollout`, but go on with `prompts.carried` and leave the last groups to the next rollout.

    It ends when all sequences of the share `config.carry_over` of the groups are done. That decision reads only
    committed tokens, so it leaves the law as it is. Without carried sequences it is `speculative_rollout`.
    """
    if prompts.carried is None:
        return speculative_rollout(policy, drafter, params, prompts, seed_step, config)
    carried, decoding = prompts.carried, Decoding(policy, drafter, params, config)
    assert carried.done is not None
    rows, groups = len(carried.lengths), len(prompts.lengths)
    left_over = groups - config.finished_groups(groups)
    run = PhaseRun(decoding, replace(prompts, carried=None), seed_step, left_over=left_over)
    start = start_rollout(decoding, run.prompts, seed_step, run.phase.slots)
    state, _, record = run_phases(run, resume(run, start, carried))
    return replace(record, done=jnp.ones(rows, bool).at[state.sequence].set(state.done))


def resume(run: PhaseRun, start: Carry, carried: Rollout) -> Carry:
    """Return the start of a rollout with the sequences of `carried` in place of those that start there.

    A data shard goes on with at most as many as its rollout leaves: its rows must have been of the same shard before.
    Raises ValueError if sequences wait for slots, since all must have a row, and if a rollout leaves no group or all.
    """
    decoding, config, sequences = run.decoding, run.decoding.config, run.sequences
    most, groups = config.left_over(sequences), len(run.prompts.lengths)
    if not 0 < most < sequences:
        raise ValueError(
            f"rollout.carry_over = {config.carry_over}: finishes {config.finished_groups(groups)} of the {groups} "
            f"groups of a data shard; must be 1 .. {groups - 1} of them"
        )
    if start.queue is not None:
        raise ValueError(
            f"rollout.phases = {config.phases}: the first must have at least {sequences} slots with carry_over, one "
            "for each sequence of a data shard"
        )
    # The routes of earlier tokens are not carried over.
    state = replace(_put(config, carried, start.state), keys=_keys(run, carried), routes=None)
    rows = jnp.nonzero((carried.lengths > 0) & ~state.done, size=most, fill_value=sequences)[0]
    at = jnp.minimum(rows, sequences - 1)
    take = partial(jax.tree.map, lambda x: x[at])
    texts = _texts(jax.tree.map(lambda x: x[at // config.group_size], run.prompts), take(carried))
    prefilled = replace(prefill(decoding, texts, config.draft_length_in(0) > 0), routes=None)
    prefilled = kv.resize(prefilled, state.cache[0].k.shape[2] - texts.tokens.shape[1])
    resumed = replace(take(state), cache=prefilled.cache, draft=prefilled.draft)
    resumed = next_token(decoding, resumed, prefilled)
    state = jax.tree.map(lambda old, new: old.at[rows].set(new, mode="drop"), state, resumed)
    return start._replace(state=state, record=replace(start.record, routes=None))


def _keys(run: PhaseRun, carried: Rollout) -> UInt32[Array, "R 2"]:
    """Return the key of each sequence, by the step in which it began."""
    (seed, step), size = run.seed_step, run.decoding.config.group_size
    assert carried.began is not None
    began = jnp.where(carried.lengths > 0, carried.began, step)
    return sequence_keys((seed, began), jnp.repeat(run.prompts.id, size), jnp.arange(run.sequences) % size)


def _put(config: RolloutConfig, carried: Rollout, state: RoundState) -> RoundState:
    """Return the state with what earlier rollouts wrote, in the rows that they began."""
    begun, more = carried.lengths > 0, ((0, 0), (0, state.tokens.shape[1] - carried.tokens.shape[1]))
    written: dict[str, Any] = {
        name: jnp.pad(getattr(carried, name), more) for name in ("tokens", "law", "full", "writer")
    }
    written |= dict(emitted=carried.lengths, done=carried.done, stopped=carried.stopped)
    if config.stop_automaton is not None:
        written["stop_state"] = config.stop_automaton.after(carried.tokens, carried.lengths)
    return replace(state, **{name: where_rows(begun, new, getattr(state, name)) for name, new in written.items()})


def _texts(prompts: Prompts, written: Rollout) -> Prompts:
    """Return each prompt followed by what was written after it, as a prompt."""
    tokens = jnp.pad(prompts.tokens, ((0, 0), (0, written.tokens.shape[1])))
    put = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at,)))
    return Prompts(put(tokens, written.tokens, prompts.lengths), prompts.lengths + written.lengths, prompts.id)

"""Generation by lossless speculative decoding on one data shard: speculative rounds, phase by phase.

Sequences in slots are decoded together. Sequences without a slot wait and are admitted as slots become free. When none
waits, later phases shrink the batch to the rows that are not finished. In each phase the caches are as long as its
rows may become.
"""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array

from specjax.drafters import Drafter
from specjax.drafters.base import zeros_like_result
from specjax.keys import SeedStep
from specjax.rollout.admission import (
    Carry,
    Queue,
    compact,
    empty_record,
    prefill,
    share_finished,
    start_rows,
    write_back,
)
from specjax.rollout.lookup_acceptance import count_lookup_acceptance
from specjax.rollout.phase import PhaseRun, plain_rounds
from specjax.rollout.plan import RolloutConfig, admission, lay_out
from specjax.rollout.rounds import Decoding
from specjax.types import Params, Policy, Prompts, Rollout


def speculative_rollout(
    policy: Policy, drafter: Drafter, params: Params, prompts: Prompts, seed_step: SeedStep, config: RolloutConfig
) -> Rollout:
    """Return G completions of each of this shard's prompts, sampled from the policy's processed law.

    With `coupled`, the tokens depend only on (seed, step, prompt id, sample, prompt, law, policy). With `rejection` and
    `block` they also depend on the proposals. They depend on the other rows and the phases only where these
    decide the proposals: through automatically chosen draft lengths, or a drafter that reads other completions of the
    same prompt.

    Raises ValueError for prompts with carried sequences, which `specjax.carry_over_rollout` goes on with, and for an
    environment on the host.
    """
    if config.answers_on_host:
        raise ValueError("environment: answers on the host, between programs; call make_generate or make_train_step")
    if prompts.carried is not None:
        raise ValueError("prompts.carried: must be None; call specjax.carry_over_rollout to go on with sequences")
    run = PhaseRun(Decoding(policy, drafter, params, config), prompts, seed_step)
    return run_phases(run, start_rollout(run.decoding, prompts, seed_step, run.phase.slots)).record


def run_phases(first: PhaseRun, carry: Carry) -> Carry:
    """Run all phases, given the first one. Return the carry after them; its record is the rollout."""
    decoding, by_phase = first.decoding, []
    for number, phase in enumerate(first.phases):
        if phase.slots < len(carry.state.done):
            record = write_back(carry.record, carry.state)
            state = share_finished(decoding, compact(carry.state, phase.slots), record, first.prompts)
            carry = Carry(state, None, record)
        run = replace(first, number=number)
        before, (carry, count) = carry, run.run(carry)
        by_phase.append((count, run.draft_length, plain_rounds(before, carry, count)))
    return carry._replace(record=finished_record(decoding, carry, by_phase))


def finished_record(decoding: Decoding, carry: Carry, by_phase: Sequence[tuple[Array, Array, Array]]) -> Rollout:
    """Return the rollout at its end. by_phase: rounds of each phase, their draft length, rounds of plain decoding."""
    record = write_back(carry.record, carry.state, live=True)
    if len(decoding.config.lengths) > 1 and not jax.tree.leaves(decoding.params.draft):
        record = replace(record, lookup_counts=count_lookup_acceptance(decoding, carry.state)[None])
    loop_rounds, draft_length, plain = (jnp.stack(x)[None] for x in zip(*by_phase, strict=True))
    return replace(record, loop_rounds=loop_rounds, draft_length=draft_length, plain_rounds=plain)


def start_rollout(decoding: Decoding, prompts: Prompts, seed_step: SeedStep, slots: int) -> Carry:
    """Return the start of a rollout: the first sequences in their slots, the others waiting, and an empty record."""
    config, group = decoding.config, decoding.config.group_size
    sequences, sequence, started = len(prompts.lengths) * group, jnp.arange(slots), -(-slots // group)
    drafting = config.draft_length_in(0) > 0
    started_prompts = prefill(decoding, jax.tree.map(lambda x: x[:started], prompts), drafting)
    length = prompts.tokens.shape[1] + config.max_new_tokens + config.room
    state = start_rows(decoding, started_prompts, sequence // group, sequence, seed_step, length)
    record = empty_record(config, sequences)
    if state.routes is not None:
        _, width, *chosen = state.routes.shape
        record = replace(record, routes=jnp.zeros((sequences, width - config.room, *chosen), state.routes.dtype))
    if lay_out(config, sequences, prompts.tokens.shape[1])[-1].slots < sequences:
        # Sequences leave their slots before the rollout ends: give the drafter's state room for their completions.
        state = share_finished(decoding, state, record, prompts)
    if slots == sequences:
        return Carry(state, None, record)
    prompts_kept = jax.tree.map(lambda x: x[: admission(config, slots)[1]], prompts)
    prefilled = zeros_like_result(lambda: prefill(decoding, prompts_kept, drafting))
    # Samples of the last prompt started may still wait, so its prefill is kept.
    prefilled = jax.tree.map(lambda zeros, made: zeros.at[0].set(made[-1]), prefilled, started_prompts)
    next_sequence = jnp.int32(slots)
    return Carry(state, Queue(next_sequence, next_sequence // group, jnp.int32(started * group), prefilled), record)

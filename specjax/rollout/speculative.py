"""Generation by lossless speculative decoding on one data shard: speculative rounds, phase by phase.

Sequences in slots are decoded together. Sequences without a slot wait and are admitted as slots become free. When none
waits, later phases shrink the batch to the rows that are not finished. In each phase the caches are as long as its
rows may become.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

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
from specjax.rollout.resume import left_over, resume
from specjax.rollout.rounds import Decoding
from specjax.types import Params, Policy, Prompts, Rollout


def speculative_rollout(
    policy: Policy, drafter: Drafter, params: Params, prompts: Prompts, seed_step: SeedStep, config: RolloutConfig
) -> Rollout:
    """Return G completions of each of this shard's prompts, sampled from the policy's processed law.

    With `coupled`, the tokens depend on (seed, step, prompt id, sample, prompt, law, policy) alone. With `rejection`
    and `block` they also depend on the proposals. They depend on the other rows and the phases only where these
    decide the proposals: through automatically chosen draft lengths, or a drafter that reads other completions of the
    same prompt.

    With carried sequences (`Prompts.carried`) it goes on with them, and ends when the share `config.carry_over` of
    those that it has to generate is done. That decision reads committed tokens alone, so it leaves the law as it is.
    """
    prompts, carried = replace(prompts, carried=None), prompts.carried
    decoding, sequences = Decoding(policy, drafter, params, config), len(prompts.lengths) * config.group_size
    phases = lay_out(config, sequences, prompts.tokens.shape[1])
    carry = start_rollout(decoding, prompts, seed_step, phases[0].slots, leaving=phases[-1].slots < sequences)
    unfinished = None
    if carried is not None:
        carry, unfinished = resume(decoding, carry, prompts, carried, seed_step), left_over(decoding, carried)
    by_phase = []
    for number, phase in enumerate(phases):
        if phase.slots < len(carry.state.done):
            record = write_back(carry.record, carry.state)
            carry = Carry(share_finished(decoding, compact(carry.state, phase.slots), record, prompts), None, record)
        run = PhaseRun(decoding, prompts, seed_step, phases, number, unfinished)
        before, (carry, count) = carry, run.run(carry)
        by_phase.append((count, run.draft_length, plain_rounds(before, carry, count)))
    loop_rounds, draft_length, plain = (jnp.stack(x)[None] for x in zip(*by_phase, strict=True))
    record = write_back(carry.record, carry.state, unfinished=carried is not None)
    if carried is not None:
        record = replace(record, done=jnp.ones(sequences, bool).at[carry.state.sequence].set(carry.state.done))
    if len(config.lengths) > 1 and not jax.tree.leaves(params.draft):
        record = replace(record, lookup_counts=count_lookup_acceptance(decoding, carry.state)[None])
    return replace(record, loop_rounds=loop_rounds, draft_length=draft_length, plain_rounds=plain)


def start_rollout(
    decoding: Decoding, prompts: Prompts, seed_step: SeedStep, slots: int, *, leaving: bool = False
) -> Carry:
    """Return the start of a rollout: the first sequences in their slots, the others waiting, and an empty record.

    leaving: whether sequences leave their slots before the rollout ends. The drafter's state then has room for the
             completions of finished samples.
    """
    config, group = decoding.config, decoding.config.group_size
    sequences, sequence, started = len(prompts.lengths) * group, jnp.arange(slots), -(-slots // group)
    drafting = config.draft_length_in(0) > 0
    started_prompts = prefill(decoding, jax.tree.map(lambda x: x[:started], prompts), drafting)
    length = prompts.tokens.shape[1] + config.max_new_tokens + config.slack
    state = start_rows(decoding, started_prompts, sequence // group, sequence, seed_step, length)
    record = empty_record(config, sequences)
    if state.routes is not None:
        _, width, *chosen = state.routes.shape
        record = replace(record, routes=jnp.zeros((sequences, width - config.slack, *chosen), state.routes.dtype))
    if leaving:
        state = share_finished(decoding, state, record, prompts)
    if slots == sequences:
        return Carry(state, None, record)
    prompts_kept = jax.tree.map(lambda x: x[: admission(config, slots)[1]], prompts)
    prefilled = zeros_like_result(lambda: prefill(decoding, prompts_kept, drafting))
    # Samples of the last prompt started may still wait, so its prefill is kept.
    prefilled = jax.tree.map(lambda zeros, made: zeros.at[0].set(made[-1]), prefilled, started_prompts)
    next_sequence = jnp.int32(slots)
    return Carry(state, Queue(next_sequence, next_sequence // group, jnp.int32(started * group), prefilled), record)

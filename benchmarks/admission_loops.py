"""Rollout functions that admit waiting sequences in other ways than specjax. One phase, on one shard."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from specjax.drafters import Drafter
from specjax.drafters.base import zeros_like_result
from specjax.keys import SeedStep, sequence_keys
from specjax.rollout.admission import Carry, admit, empty_record, prefill, start_rows, write_back
from specjax.rollout.plan import RolloutConfig, admission
from specjax.rollout.rounds import Decoding, RoundState, commit, no_proposal, round_once
from specjax.rollout.speculative import start_rollout
from specjax.types import Params, Policy, Prompts, Rollout


def conditional(
    policy: Policy, drafter: Drafter, params: Params, prompts: Prompts, seed_step: SeedStep, config: RolloutConfig
) -> Rollout:
    """Generate in one loop. Its body admits sequences if enough slots are free, then runs a round."""
    decoding, k = Decoding(policy, drafter, params, config), config.draft_length
    sequences, slots = len(prompts.lengths) * config.group_size, config.phases[0][0]
    rows, drafting = admission(config, slots)[0], jnp.bool_(k > 0)
    admit_next = partial(admit, decoding, prompts=prompts, seed_step=seed_step, rows=rows, drafting=drafting)

    def body(carry: Carry) -> Carry:
        assert carry.queue is not None
        waiting = sequences - carry.queue.next_sequence
        can_admit = (waiting > 0) & (jnp.sum(carry.state.done) >= jnp.minimum(rows, waiting))

        carry = jax.lax.cond(can_admit, admit_next, lambda carry: carry, carry)
        return carry._replace(state=round_once(decoding, carry.state, k))

    def sequences_left(carry: Carry) -> Array:
        assert carry.queue is not None
        return (carry.queue.next_sequence < sequences) | ~carry.state.done.all()

    carry = jax.lax.while_loop(sequences_left, body, start_rollout(decoding, prompts, seed_step, slots))
    return write_back(carry.record, carry.state)


class Rows(NamedTuple):
    """State of the loop of `reading`.

    Attributes:
        state:  Rows being decoded.
        read:   int32 [B], prompt tokens in each row's cache.
        next:   int32, number of sequences admitted so far.
        record: Finished sequences.
    """

    state: RoundState
    read: Int[Array, "B"]
    next: Int[Array, ""]
    record: Rollout

    @property
    def in_prompt(self) -> Bool[Array, "B"]:
        """Return which rows have not read their whole prompt."""
        return (self.read < self.state.prompt) & ~self.state.done

    @property
    def start(self) -> Int[Array, "B"]:
        """Return the number of valid cached positions per row."""
        return jnp.where(self.in_prompt, self.read, self.state.visible)


def reading(
    policy: Policy, drafter: Drafter, params: Params, prompts: Prompts, seed_step: SeedStep, config: RolloutConfig
) -> Rollout:
    """Generate in one loop without prefill.

    A row that is still reading its prompt feeds the next K + 1 prompt tokens to the forward, instead of a proposal.
    """
    decoding = Decoding(policy, drafter, params, config)
    sequences, slots = len(prompts.lengths) * config.group_size, config.phases[0][0]

    def body(rows: Rows) -> Rows:
        can_admit = (rows.next < sequences) & rows.state.done.any()
        rows = jax.lax.cond(can_admit, lambda rows: _admit(decoding, rows, prompts, seed_step), lambda rows: rows, rows)
        return _read_or_round(decoding, rows, prompts)

    zeros = jnp.zeros(slots, jnp.int32)
    nothing = zeros_like_result(lambda: prefill(decoding, prompts, jnp.bool_(config.draft_length > 0)))
    length = prompts.tokens.shape[1] + config.max_new_tokens + config.slack
    empty = start_rows(decoding, nothing, zeros, zeros + sequences, seed_step, length)
    rows = Rows(replace(empty, done=zeros == 0), zeros, jnp.int32(0), empty_record(config, sequences))
    rows = jax.lax.while_loop(lambda rows: (rows.next < sequences) | ~rows.state.done.all(), body, rows)
    return write_back(rows.record, rows.state)


def _admit(decoding: Decoding, rows: Rows, prompts: Prompts, seed_step: SeedStep) -> Rows:
    """Admit the next sequences to all free slots, with no prompt token read yet. Old cache entries are not visible."""
    state, config = rows.state, decoding.config
    sequences, group = len(prompts.lengths) * config.group_size, config.group_size
    record = write_back(rows.record, state)
    number = rows.next + jnp.cumsum(state.done, dtype=jnp.int32) - 1
    fresh = state.done & (number < sequences)
    sequence = jnp.where(fresh, number, state.sequence)
    prompt = jnp.minimum(sequence // group, len(prompts.lengths) - 1)

    def cleared(x: Array) -> Array:
        return jnp.where(fresh.reshape(-1, *(1,) * (x.ndim - 1)), jnp.zeros((), x.dtype), x)

    draft = state.draft
    if config.draft_length:
        visible, emitted = (jnp.where(fresh, 0, x) for x in (rows.start, state.emitted))
        draft = decoding.drafter.catch_up(draft, visible, state.tokens, emitted)
    state = replace(
        state,
        sequence=sequence,
        keys=jnp.where(fresh[:, None], sequence_keys(seed_step, prompts.id[prompt], sequence % group), state.keys),
        prompt=jnp.where(fresh, prompts.lengths[prompt], state.prompt),
        draft=draft,
        **{
            name: cleared(getattr(state, name))
            for name in ("emitted", "done", "stopped", "drafted", "accepted", "row_rounds")
        },
    )
    return Rows(state, cleared(rows.read), rows.next + jnp.sum(fresh, dtype=jnp.int32), record)


def _read_or_round(decoding: Decoding, rows: Rows, prompts: Prompts) -> Rows:
    """Run one forward: K + 1 prompt tokens for rows still reading their prompt, a round for the others."""
    policy, drafter, params, config = decoding.policy, decoding.drafter, decoding.params, decoding.config
    state, read, k = rows.state, rows.read, config.draft_length
    in_prompt = rows.in_prompt
    own = prompts.tokens[jnp.minimum(state.sequence // config.group_size, len(prompts.lengths) - 1)]
    column = jnp.arange(k + 1)[None]

    def upcoming(first: Array) -> Array:
        return jnp.take_along_axis(own, jnp.minimum(first[:, None] + column, own.shape[1] - 1), axis=1)

    # A row reading its prompt emits its first token at the end of the prompt, where `visible` already points.
    noise = decoding.verifier.noise(state.keys, state.visible + 1, k, policy.vocab_size)
    proposal, draft = no_proposal(len(read), policy), state.draft
    if k:
        proposal, draft = drafter.propose(params, draft, noise.draft, config.law)
        proposal = proposal._replace(length=jnp.where(in_prompt, 0, proposal.length))
    drafted = jnp.concatenate([state.pending[:, None], proposal.tokens], axis=1)
    tokens = jnp.where(in_prompt[:, None], upcoming(read), drafted)
    output = policy.apply(params.policy, tokens, rows.start, state.cache)

    count = jnp.where(in_prompt, jnp.minimum(state.prompt - read, k + 1), 0)
    unfinished = in_prompt & (read + count < state.prompt)
    last = jnp.maximum(count - 1, 0)[:, None]
    logits = jnp.take_along_axis(output.logits, jnp.minimum(column + last, k)[..., None], axis=1)
    emitted_before = state.emitted
    state = replace(
        state,
        cache=output.cache,
        draft=draft,
        done=state.done | unfinished,
        row_rounds=state.row_rounds + (~state.done & ~in_prompt).astype(jnp.int32),
    )
    # The drafter observes the tokens below instead, because it also has to read prompts.
    without_draft = replace(decoding, config=replace(config, draft_length=0))
    state = commit(without_draft, state, logits, None, proposal, noise)
    if k:
        new_tokens = jax.vmap(lambda row, at: jax.lax.dynamic_slice(row, (at,), (k + 1,)))(state.tokens, emitted_before)
        after = jnp.where((column == last) & ~unfinished[:, None], new_tokens[:, :1], upcoming(read + 1))
        following = jnp.where(in_prompt[:, None], after, new_tokens)
        observed = jnp.where(in_prompt, count, state.emitted - emitted_before)
        state = replace(state, draft=drafter.observe(state.draft, drafter.features(output), following, observed))
    return rows._replace(state=replace(state, done=state.done & ~unfinished), read=read + count)

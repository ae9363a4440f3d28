"""Sequences that wait for a slot: their prompts are prefilled, once for all samples, and admitted as slots free up."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax import cache as kv
from specjax.drafters.base import DraftState
from specjax.drafters.lookup import encode
from specjax.keys import SeedStep, sequence_keys
from specjax.rollout.plan import RolloutConfig
from specjax.rollout.rounds import Decoding, RoundState, commit, no_proposal
from specjax.types import Cache, Prompts, Rollout, pytree

# The fields that a `RoundState` accumulates of a `Rollout`.
BY_TOKEN = "tokens", "law", "full", "draft_outcome", "writer"
BY_ROW = "stopped", "drafted", "accepted", "row_rounds"


@pytree
class Prefill:
    """M prompts run through the networks, for all of their samples.

    cache:    the policy's, of P positions. draft: the drafter's state.
    logits:   of the last prompt token. features: what the drafter reads of it.
    """

    prompts: Prompts
    cache: Cache
    draft: DraftState
    logits: Float[Array, "M 1 V"]
    features: Float[Array, "M 1 F"]


@pytree
class Queue:
    """The sequences that wait for a slot, from `next_sequence` on.

    prefilled: prompts from `first_prompt` on, for sequences before `end_sequence`.
    """

    next_sequence: Int[Array, ""]
    first_prompt: Int[Array, ""]
    end_sequence: Int[Array, ""]
    prefilled: Prefill


class Carry(NamedTuple):
    """State that goes from phase to phase: rows in their slots, waiting (None if none wait) and finished sequences."""

    state: RoundState
    queue: Queue | None
    record: Rollout


def prefill(decoding: Decoding, prompts: Prompts, drafting: Bool[Array, ""]) -> Prefill:
    """Run one forward over the prompts. `drafting`: whether rounds that draft come next."""
    policy, drafter, config = decoding.policy, decoding.drafter, decoding.config
    count, width = prompts.tokens.shape
    cache, start, final = policy.init_cache(count, width), jnp.zeros(count, jnp.int32), prompts.lengths - 1
    with jax.named_scope("prefill"):
        output = policy.apply(decoding.params.policy, prompts.tokens, start, cache, final)
        features, draft = drafter.features(output), ()
        if max(config.lengths):
            draft = drafter.start(decoding.params, prompts, features, config.slack, drafting)
    assert output.cache is not None
    return Prefill(prompts, output.cache, draft, output.logits, kv.token_at(features, final))


def empty_record(config: RolloutConfig, sequences: int) -> Rollout:
    """Return the record of sequences that have not begun."""
    lengths = jnp.zeros(sequences, jnp.int32)
    return Rollout(lengths=lengths, **_blank_record(config, sequences, config.max_new_tokens))


def _blank_record(config: RolloutConfig, rows: int, columns: int) -> dict[str, Any]:
    """Return what a `RoundState` accumulates of a `Rollout`, by field."""
    zeros, by_position = jnp.zeros(rows, jnp.int32), jnp.zeros((rows, config.slack - 1), jnp.int32)
    by_token = jnp.zeros((rows, columns), jnp.int32)
    log_probs = by_token.astype(jnp.float32)
    by_row = dict(stopped=zeros > 0, drafted=by_position, accepted=by_position, row_rounds=zeros)
    ints = dict(tokens=by_token, draft_outcome=by_token, writer=by_token.astype(jnp.int8))
    return by_row | ints | dict(law=log_probs, full=log_probs)


def start_rows(
    decoding: Decoding,
    kept: Prefill,
    prompt: Int[Array, "B"],
    sequence: Int[Array, "B"],
    seed_step: SeedStep,
    length: int,
) -> RoundState:
    """Return rows at their first token: row b is sequence `sequence[b]`, a sample of prompt `prompt[b]` of `kept`.

    length: positions of their caches.
    """
    policy, config, rows = decoding.policy, decoding.config, len(prompt)
    own: Prefill = jax.tree.map(lambda x: x[prompt], kept)
    own = kv.resize(own, length - own.cache[0].k.shape[2])
    zeros = jnp.zeros(rows, jnp.int32)
    state = RoundState(
        sequence=sequence,
        keys=sequence_keys(seed_step, own.prompts.id, sequence % config.group_size),
        prompt=own.prompts.lengths,
        emitted=zeros,
        pending=zeros,
        done=zeros > 0,
        cache=own.cache,
        draft=own.draft,
        **_blank_record(config, rows, config.max_new_tokens + config.slack),
    )
    noise = decoding.verifier.noise(state.keys, state.prompt, 0, policy.vocab_size)
    features = own.features if config.slack > 1 else None
    return commit(decoding, state, own.logits, features, no_proposal(rows, policy), noise)


@jax.named_scope("admit")
def admit(
    decoding: Decoding, carry: Carry, prompts: Prompts, seed_step: SeedStep, *, rows: int, drafting: Bool[Array, ""]
) -> Carry:
    """Start the next `rows` sequences, or as many as are left of the prefilled prompts, in the first free slots."""
    state, queue = carry.state, carry.queue
    assert queue is not None
    slots, group, count = len(state.done), decoding.config.group_size, len(queue.prefilled.prompts.lengths)
    length = state.cache[0].k.shape[2]

    def refill(queue: Queue) -> Queue:
        first = queue.next_sequence // group
        index = jnp.minimum(first + jnp.arange(count), len(prompts.lengths) - 1)
        prefilled = prefill(decoding, jax.tree.map(lambda x: x[index], prompts), drafting)
        end = jnp.minimum((first + count) * group, len(prompts.lengths) * group)
        return Queue(queue.next_sequence, first, end, prefilled)

    queue = jax.lax.cond(queue.next_sequence == queue.end_sequence, refill, lambda queue: queue, queue)
    record = write_back(carry.record, state)
    sequence = queue.next_sequence + jnp.arange(rows)
    prompt = jnp.clip(sequence // group - queue.first_prompt, 0, count - 1)
    started = start_rows(decoding, queue.prefilled, prompt, sequence, seed_step, length)
    state, started = (share_finished(decoding, x, record, prompts) for x in (state, started))
    free = jnp.nonzero(state.done, size=rows, fill_value=slots)[0]
    admitted = (sequence < queue.end_sequence) & (free < slots)
    into = jnp.where(admitted, free, slots)
    state = jax.tree.map(lambda old, new: old.at[into].set(new, mode="drop"), state, started)
    queue = replace(queue, next_sequence=queue.next_sequence + jnp.sum(admitted, dtype=jnp.int32))
    return Carry(state, queue, record)


def write_back(record: Rollout, state: RoundState) -> Rollout:
    """Return the record of all sequences with those of the finished rows."""
    budget = record.tokens.shape[1]
    real = jnp.arange(budget)[None] < state.emitted[:, None]
    into = jnp.where(state.done, state.sequence, len(record.lengths))

    def put(name: str, new: Array) -> Array:
        if name in BY_TOKEN:
            new = jnp.where(real, new[:, :budget], jnp.zeros((), new.dtype))
        return getattr(record, name).at[into].set(new, mode="drop")

    own = {name: getattr(state, name) for name in (*BY_TOKEN, *BY_ROW)} | {"lengths": state.emitted}
    return replace(record, **{name: put(name, new) for name, new in own.items()})


@jax.named_scope("shrink")
def compact(state: RoundState, slots: int) -> RoundState:
    """Return the live rows, at most `slots` of them, and finished ones in the slots left over."""
    rows = jnp.argsort(state.done, stable=True)[:slots]
    return jax.tree.map(lambda x: x[rows], state)


def share_finished(decoding: Decoding, state: RoundState, record: Rollout, prompts: Prompts) -> RoundState:
    """Let the rows' drafts observe the other samples of their groups that have ended."""
    if max(decoding.config.lengths) == 0:
        return state
    group = state.sequence // decoding.config.group_size
    real = jnp.arange(record.tokens.shape[1])[None] < record.lengths[:, None]
    texts = encode(record.tokens, real).reshape(len(prompts.lengths), -1, record.tokens.shape[1])
    own = jax.tree.map(lambda x: x[group], prompts)
    others = texts[group].at[jnp.arange(len(group)), state.sequence % decoding.config.group_size].set(0)
    return replace(state, draft=decoding.drafter.observe_finished(state.draft, own, others))

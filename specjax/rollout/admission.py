"""Sequences that wait for a slot: their prompts are prefilled, once for all samples, and let in as slots free up."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax import cache as kv
from specjax.drafters.base import DraftState
from specjax.drafters.lookup import encode
from specjax.keys import SeedStep, sequence_keys
from specjax.rollout.plan import RolloutConfig
from specjax.rollout.rounds import Decoding, RoundState, commit, no_proposal
from specjax.types import Cache, Prompts, PyTree, Rollout, pytree


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


def prefill(decoding: Decoding, prompts: Prompts, drafting: Bool[Array, ""]) -> Prefill:
    """One forward over the prompts. The drafter rests where it is not going to draft: most are left blank."""
    policy, drafter, config = decoding.policy, decoding.drafter, decoding.config
    count, width = prompts.tokens.shape
    cache, start, final = policy.init_cache(count, width), jnp.zeros(count, jnp.int32), prompts.lengths - 1
    with jax.named_scope("prefill"):
        output = policy.apply(decoding.params.policy, prompts.tokens, start, cache, final)

        def begin() -> DraftState:
            return drafter.start(decoding.params, prompts, drafter.features(output), config.slack)

        if max(config.lengths) == 0:
            draft = ()
        else:
            draft = jax.lax.cond(
                drafting,
                begin,
                lambda: drafter.start_without_drafting(decoding.params, prompts, zeros_like_result(begin)),
            )
    features = kv.token_at(drafter.features(output), final)
    assert output.cache is not None
    return Prefill(prompts, output.cache, draft, output.logits, features)


def zeros_like_result(make: Callable[[], PyTree]) -> PyTree:
    """Zeros in the shape of what `make` returns."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(make))


def empty_record(config: RolloutConfig, sequences: int) -> Rollout:
    """The record of sequences that have not begun."""
    zeros, by_position = jnp.zeros(sequences, jnp.int32), jnp.zeros((sequences, config.slack - 1), jnp.int32)
    by_token = jnp.zeros((sequences, config.max_new_tokens), jnp.int32)
    log_probs = by_token.astype(jnp.float32)
    return Rollout(
        tokens=by_token,
        lengths=zeros,
        stopped=zeros > 0,
        law=log_probs,
        full=log_probs,
        drafted=by_position,
        accepted=by_position,
        row_rounds=zeros,
        draft_outcome=by_token,
        writer=by_token.astype(jnp.int8),
    )


def start_rows(
    decoding: Decoding,
    kept: Prefill,
    prompt: Int[Array, "B"],
    sequence: Int[Array, "B"],
    seed_step: SeedStep,
    length: int,
) -> RoundState:
    """Rows at their first token: row b is `sequence[b]` of the rollout, a sample of prompt `prompt[b]` of those kept.

    length: positions of their caches.
    """
    policy, config, rows = decoding.policy, decoding.config, len(prompt)
    own: Prefill = jax.tree.map(lambda x: x[prompt], kept)
    own = kv.resize(own, length - own.cache[0].k.shape[2])
    zeros, by_position = jnp.zeros(rows, jnp.int32), jnp.zeros((rows, config.slack - 1), jnp.int32)
    by_token = jnp.zeros((rows, config.max_new_tokens + config.slack), jnp.int32)
    log_probs = by_token.astype(jnp.float32)
    state = RoundState(
        sequence=sequence,
        keys=sequence_keys(seed_step, own.prompts.id, sequence % config.group_size),
        prompt=own.prompts.lengths,
        emitted=zeros,
        pending=zeros,
        done=zeros > 0,
        stopped=zeros > 0,
        cache=own.cache,
        draft=own.draft,
        tokens=by_token,
        law=log_probs,
        full=log_probs,
        drafted=by_position,
        accepted=by_position,
        draft_outcome=by_token,
        writer=by_token.astype(jnp.int8),
        row_rounds=zeros,
    )
    noise = decoding.verifier.noise(state.keys, state.prompt, 0, policy.vocab_size)
    features = own.features if config.slack > 1 else None
    return commit(decoding, state, own.logits, features, no_proposal(rows, policy), noise)


@jax.named_scope("admit")
def admit(
    decoding: Decoding,
    state: RoundState,
    queue: Queue,
    record: Rollout,
    *,
    prompts: Prompts,
    seed_step: SeedStep,
    rows: int,
    drafting: Bool[Array, ""],
) -> tuple[RoundState, Queue, Rollout]:
    """The next `rows` sequences, or as many as are left of the prompts kept, take the first free slots."""
    slots, group, count = len(state.done), decoding.config.group_size, len(queue.prefilled.prompts.lengths)
    length = state.cache[0].k.shape[2]

    def refill(queue: Queue) -> Queue:
        first = queue.next_sequence // group
        index = jnp.minimum(first + jnp.arange(count), len(prompts.lengths) - 1)
        prefilled = prefill(decoding, jax.tree.map(lambda x: x[index], prompts), drafting)
        end = jnp.minimum((first + count) * group, len(prompts.lengths) * group)
        return Queue(queue.next_sequence, first, end, prefilled)

    queue = jax.lax.cond(queue.next_sequence == queue.end_sequence, refill, lambda queue: queue, queue)
    record = write_back(record, state, decoding)
    sequence = queue.next_sequence + jnp.arange(rows)
    prompt = jnp.clip(sequence // group - queue.first_prompt, 0, count - 1)
    started = start_rows(decoding, queue.prefilled, prompt, sequence, seed_step, length)
    state, started = (share_finished(decoding, x, record, prompts) for x in (state, started))
    free = jnp.nonzero(state.done, size=rows, fill_value=slots)[0]
    admitted = (sequence < queue.end_sequence) & (free < slots)
    into = jnp.where(admitted, free, slots)
    state = jax.tree.map(lambda old, new: old.at[into].set(new, mode="drop"), state, started)
    return state, replace(queue, next_sequence=queue.next_sequence + jnp.sum(admitted, dtype=jnp.int32)), record


def write_back(record: Rollout, state: RoundState, decoding: Decoding) -> Rollout:
    """The record of all sequences with what the finished rows came to."""
    budget = decoding.config.max_new_tokens
    real = jnp.arange(budget)[None] < state.emitted[:, None]

    def cut(x: Array) -> Array:
        return jnp.where(real, x[:, :budget], jnp.zeros((), x.dtype))

    own = Rollout(
        tokens=cut(state.tokens),
        lengths=state.emitted,
        stopped=state.stopped,
        law=cut(state.law),
        full=cut(state.full),
        drafted=state.drafted,
        accepted=state.accepted,
        draft_outcome=jnp.where(_saw_whole_context(state, decoding)[:, None], cut(state.draft_outcome), 0),
        writer=cut(state.writer),
        row_rounds=state.row_rounds,
    )
    into = jnp.where(state.done, state.sequence, len(record.lengths))
    return jax.tree.map(lambda old, new: old.at[into].set(new, mode="drop"), record, own)


def _saw_whole_context(state: RoundState, decoding: Decoding) -> Bool[Array, "B"]:
    """Rows whose draft knew all that came before wherever it drafted."""
    config, known_from = decoding.config, None
    if 0 in config.lengths and max(config.lengths):
        known_from = decoding.drafter.known_from(state.draft)
    return jnp.ones_like(state.done) if known_from is None else known_from == 0


@jax.named_scope("shrink")
def compact(state: RoundState, slots: int) -> RoundState:
    """The rows still at work, and some finished ones, in so many slots; there must be no more of the former."""
    rows = jnp.argsort(state.done, stable=True)[:slots]
    return jax.tree.map(lambda x: x[rows], state)


def share_finished(decoding: Decoding, state: RoundState, record: Rollout, prompts: Prompts) -> RoundState:
    """The rows' drafts told of what has ended of their groups but for themselves."""
    if max(decoding.config.lengths) == 0:
        return state
    group = state.sequence // decoding.config.group_size
    real = jnp.arange(record.tokens.shape[1])[None] < record.lengths[:, None]
    texts = encode(record.tokens, real).reshape(len(prompts.lengths), -1, record.tokens.shape[1])
    own = jax.tree.map(lambda x: x[group], prompts)
    others = texts[group].at[jnp.arange(len(group)), state.sequence % decoding.config.group_size].set(0)
    return replace(state, draft=decoding.drafter.observe_finished(state.draft, own, others))

"""Admission of waiting sequences to free slots. A prompt is prefilled once for all samples that are kept together."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer

from specjax import cache as kv
from specjax.drafters.base import DraftState
from specjax.drafters.lookup import encode
from specjax.keys import SeedStep, sequence_keys
from specjax.rollout.plan import RolloutConfig
from specjax.rollout.rounds import Decoding, RoundState, commit, no_proposal, routes_of
from specjax.rollout.stop_strings import START
from specjax.rollout.turns import begin_turns
from specjax.types import Cache, Prompts, Rollout, Writer, pytree

# The fields of a `Rollout` that a `RoundState` accumulates.
BY_TOKEN = "tokens", "law", "full", "draft_outcome", "writer"
BY_ROW = "stopped", "drafted", "accepted", "row_rounds"


@pytree
class Prefill:
    """Result of the forward over M prompts, shared by all of their samples.

    Attributes:
        prompts:  The prompts.
        cache:    The policy's cache, P positions.
        draft:    The drafter's state.
        logits:   Logits at the last prompt token.
        features: The drafter's features at the last prompt token.
        routes:   Experts of each position; None without a mixture of experts.
    """

    prompts: Prompts
    cache: Cache
    draft: DraftState
    logits: Float[Array, "M 1 V"]
    features: Float[Array, "M 1 F"]
    routes: Integer[Array, "M P layers active"] | None = None


@pytree
class Queue:
    """Sequences that wait for a slot: `next_sequence` and all after it.

    prefilled: a forward over prompts from `first_prompt` on. It serves sequences below `end_sequence`; later ones need
    another.
    """

    next_sequence: Int[Array, ""]
    first_prompt: Int[Array, ""]
    end_sequence: Int[Array, ""]
    prefilled: Prefill


class Carry(NamedTuple):
    """State passed from phase to phase: rows in slots, the queue (None if none waits), the record of finished rows."""

    state: RoundState
    queue: Queue | None
    record: Rollout


def prefill(decoding: Decoding, prompts: Prompts, drafting: Bool[Array, ""]) -> Prefill:
    """Run one forward of the prompts. `drafting`: whether the next rounds draft."""
    policy, drafter, config = decoding.policy, decoding.drafter, decoding.config
    count, width = prompts.tokens.shape
    cache, start, final = policy.init_cache(count, width), jnp.zeros(count, jnp.int32), prompts.lengths - 1
    with jax.named_scope("prefill"):
        output = policy.apply(decoding.params.policy, prompts.tokens, start, cache, final)
        features, draft = drafter.features(output), ()
        if max(config.lengths):
            draft = drafter.start(decoding.params, prompts, features, config.slack, drafting)
    assert output.cache is not None
    features = kv.token_at(features, final)
    return Prefill(prompts, output.cache, draft, output.logits, features, routes_of(policy, output))


def empty_record(config: RolloutConfig, sequences: int) -> Rollout:
    """Return the record of sequences that have not begun."""
    lengths, turns = jnp.zeros(sequences, jnp.int32), dict[str, Any]()
    if config.environment is not None:
        sampled = jnp.zeros((sequences, config.max_new_tokens), bool)
        ending, returns = lengths.astype(jnp.int8), lengths.astype(jnp.float32)
        turns = dict(sampled=sampled, ending=ending, turns=lengths, returns=returns)
    return Rollout(lengths=lengths, **turns, **_blank_record(config, sequences, config.max_new_tokens))


def _blank_record(config: RolloutConfig, rows: int, columns: int) -> dict[str, Any]:
    """Return zeros for the `Rollout` fields that a `RoundState` accumulates, by name."""
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
    """Return rows with their first token: row b is sequence `sequence[b]`, a sample of prompt `prompt[b]` of `kept`.

    length: number of positions of their caches.
    """
    config, rows = decoding.config, len(prompt)
    prefilled: Prefill = jax.tree.map(lambda x: x[prompt], kept)
    prefilled = kv.resize(prefilled, length - prefilled.cache[0].k.shape[2])
    zeros, routes = jnp.zeros(rows, jnp.int32), prefilled.routes
    keys = sequence_keys(seed_step, prefilled.prompts.id, sequence % config.group_size)
    if routes is not None:
        routes = jnp.pad(routes, ((0, 0), (0, config.max_new_tokens + config.room), (0, 0), (0, 0)))
    state = RoundState(
        sequence=sequence,
        keys=keys,
        prompt=prefilled.prompts.lengths,
        emitted=zeros,
        pending=zeros,
        done=zeros > 0,
        cache=prefilled.cache,
        draft=prefilled.draft,
        routes=routes,
        stop_state=None if config.stop_automaton is None else jnp.full_like(zeros, START),
        turns=begin_turns(config, prefilled.prompts, keys),
        **_blank_record(config, rows, config.max_new_tokens + config.room),
    )
    return next_token(decoding, state, prefilled)


def next_token(decoding: Decoding, state: RoundState, prefilled: Prefill) -> RoundState:
    """Return the rows with the token after their prefill."""
    policy = decoding.policy
    noise = decoding.verifier.noise(state.keys, state.visible + 1, 0, policy.vocab_size)
    features = prefilled.features if decoding.config.slack > 1 else None
    return commit(decoding, state, prefilled.logits, features, no_proposal(len(state.done), policy), noise)


@jax.named_scope("admit")
def admit(
    decoding: Decoding, carry: Carry, prompts: Prompts, seed_step: SeedStep, *, rows: int, drafting: Bool[Array, ""]
) -> Carry:
    """Start the next `rows` sequences in the first free slots, or as many as the prefilled prompts still cover."""
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


def write_back(record: Rollout, state: RoundState, *, live: bool = False) -> Rollout:
    """Return the record with the results of the finished rows written into it; with `live`, of all rows."""
    budget = record.tokens.shape[1]
    real = jnp.arange(budget)[None] < state.emitted[:, None]
    into = state.sequence if live else jnp.where(state.done, state.sequence, len(record.lengths))

    by_row = {name: getattr(state, name) for name in BY_ROW} | {"lengths": state.emitted}
    by_token = {name: getattr(state, name) for name in BY_TOKEN}
    if state.turns is not None:
        by_row |= {"ending": state.turns.ending, "turns": state.turns.number, "returns": state.turns.returns}
        by_token |= {"sampled": state.writer != Writer.ENVIRONMENT}
    by_row |= {name: jnp.where(real, x[:, :budget], jnp.zeros((), x.dtype)) for name, x in by_token.items()}
    written = {name: getattr(record, name).at[into].set(new, mode="drop") for name, new in by_row.items()}
    if record.routes is not None and state.routes is not None:
        seen = jnp.arange(record.routes.shape[1])[None] < state.visible[:, None]
        routes = jnp.where(seen[..., None, None], state.routes[:, : seen.shape[1]], jnp.zeros((), state.routes.dtype))
        written["routes"] = record.routes.at[into].set(routes, mode="drop")
    return replace(record, **written)


@jax.named_scope("shrink")
def compact(state: RoundState, slots: int) -> RoundState:
    """Return a state of `slots` rows: the live rows first, then finished ones."""
    rows = jnp.argsort(state.done, stable=True)[:slots]
    return jax.tree.map(lambda x: x[rows], state)


def share_finished(decoding: Decoding, state: RoundState, record: Rollout, prompts: Prompts) -> RoundState:
    """Let the drafter observe, for each row, the other samples of its group that have ended."""
    if max(decoding.config.lengths) == 0:
        return state
    group = state.sequence // decoding.config.group_size
    real = jnp.arange(record.tokens.shape[1])[None] < record.lengths[:, None]
    texts = encode(record.tokens, real).reshape(len(prompts.lengths), -1, record.tokens.shape[1])
    row_prompts = jax.tree.map(lambda x: x[group], prompts)
    others = texts[group].at[jnp.arange(len(group)), state.sequence % decoding.config.group_size].set(0)
    return replace(state, draft=decoding.drafter.observe_finished(state.draft, row_prompts, others))

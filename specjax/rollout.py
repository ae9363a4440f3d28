"""Generation by lossless speculative decoding, on one data shard.

A round: the drafter proposes K tokens, the policy runs once over the pending token and the proposal, the verifier says
how many are kept and what follows, `commit` records it. Every row advances by its own length. Plain autoregressive
sampling is the same code with K = 0.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from specjax import cache as kv
from specjax.drafters import Drafter, Proposal
from specjax.drafters.base import DraftState
from specjax.keys import SeedStep, sequence_keys
from specjax.sampling import SamplingLaw, full_log_probs, pick, process_logits
from specjax.types import Cache, Params, Policy, Prompts, Rollout, pytree
from specjax.verify import VERIFIERS, Noise


@dataclass(frozen=True)
class RolloutConfig:
    """How completions are generated.

    Attributes:
        group_size:     samples of each prompt.
        max_new_tokens: length budget of a completion, the same with and without speculation.
        draft_length:   K, tokens proposed a round; 0 is plain autoregressive sampling.
        verifier:       `rejection` keeps the law, `coupled` keeps the very tokens (specjax.verify).
        stop_tokens:    each ends a completion and is part of it.
    """

    group_size: int = 8
    max_new_tokens: int = 128
    draft_length: int = 3
    verifier: Literal["rejection", "coupled"] = "rejection"
    law: SamplingLaw = field(default_factory=SamplingLaw)
    stop_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("group_size", 1), ("max_new_tokens", 1), ("draft_length", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least {least}")


@pytree
class RoundState:
    """All that a round reads and writes; every array has the row first. K and C as in `specjax.types`.

    keys:     one noise key a sequence.
    prompt:   int32, prompt length.
    emitted:  int32, completion tokens so far; before the first, the prompt's last token is the one pending.
    pending:  int32, the last emitted token, whose keys and values are not cached yet.
    done:     bool, stopped or out of budget. stopped: bool, by a stop token.
    cache:    the policy's, whose first `visible` positions count; room for a verification beyond the budget.
    draft:    the drafter's own state.
    The rest accumulates the `Rollout`; tokens, law and full have K + 1 columns of slack.
    """

    keys: Key[Array, "B"]
    prompt: Int[Array, "B"]
    emitted: Int[Array, "B"]
    pending: Int[Array, "B"]
    done: Bool[Array, "B"]
    stopped: Bool[Array, "B"]
    cache: Cache
    draft: DraftState
    tokens: Int[Array, "B C+K+1"]
    law: Float[Array, "B C+K+1"]
    full: Float[Array, "B C+K+1"]
    drafted: Int[Array, "B K"]
    accepted: Int[Array, "B K"]
    rounds: Int[Array, "B"]
    trips: Int[Array, ""]

    @property
    def visible(self) -> Int[Array, "B"]:
        """Cached positions that count: everything committed but the pending token."""
        return self.prompt + self.emitted - 1


def speculative_rollout(
    policy: Policy, drafter: Drafter, params: Params, prompts: Prompts, seed_step: SeedStep, config: RolloutConfig
) -> Rollout:
    """G completions of each of this shard's prompts, sampled from the policy's processed law.

    The tokens depend on (seed, step, prompt id, sample, prompt, law, policy) alone, and with `rejection` on the
    proposals, never on the batch around them.
    """
    state = admit(policy, drafter, params, prompts, seed_step, config)
    state = rounds(policy, drafter, params, state, config)
    return _finish(state, config)


def admit(
    policy: Policy, drafter: Drafter, params: Params, prompts: Prompts, seed_step: SeedStep, config: RolloutConfig
) -> RoundState:
    """Prefill of every prompt, shared by its group, and each sequence's first token."""
    count, width = len(prompts.lengths), prompts.tokens.shape[1]
    rows, k, samples = count * config.group_size, config.draft_length, config.group_size
    length = width + config.max_new_tokens + k + 1
    cache = policy.init_cache(count, width)
    with jax.named_scope("prefill"):
        start, final = jnp.zeros(count, jnp.int32), prompts.lengths - 1
        output = policy.apply(params.policy, prompts.tokens, start, cache, final)
        draft = drafter.start(params, prompts, output.features, length, k + 1) if k else ()

    def group(x: Array) -> Array:
        return jnp.repeat(x, samples, axis=0)

    none, zeros = jnp.zeros((rows, k), jnp.int32), jnp.zeros(rows, jnp.int32)
    record = jnp.zeros((rows, config.max_new_tokens + k + 1), jnp.float32)
    state = RoundState(
        keys=sequence_keys(seed_step, group(prompts.id), jnp.tile(jnp.arange(samples), count)),
        prompt=group(prompts.lengths),
        emitted=zeros,
        pending=zeros,
        done=zeros > 0,
        stopped=zeros > 0,
        cache=jax.tree.map(group, kv.resize(output.cache, length)),
        draft=jax.tree.map(group, draft),
        tokens=record.astype(jnp.int32),
        law=record,
        full=record,
        drafted=none,
        accepted=none,
        rounds=zeros,
        trips=jnp.int32(0),
    )
    noise = VERIFIERS[config.verifier].noise(state.keys, state.prompt, 0, policy.vocab_size)
    features = group(jnp.take_along_axis(output.features, final[:, None, None], axis=1))
    return _commit(state, drafter, group(output.logits), features, _no_proposal(state, policy), noise, config)


def rounds(policy: Policy, drafter: Drafter, params: Params, state: RoundState, config: RolloutConfig) -> RoundState:
    """Rounds until every row is done."""
    return jax.lax.while_loop(
        lambda state: ~jnp.all(state.done),
        lambda state: round_once(policy, drafter, params, state, config),
        state,
    )


def round_once(
    policy: Policy, drafter: Drafter, params: Params, state: RoundState, config: RolloutConfig
) -> RoundState:
    """Draft, verify, commit: one trip of `rounds`, by which every row that is not done grows by 1 .. K + 1 tokens."""
    k = config.draft_length
    noise = VERIFIERS[config.verifier].noise(state.keys, state.visible + 1, k, policy.vocab_size)
    proposal = _no_proposal(state, policy)
    if k:
        with jax.named_scope("draft"):
            proposal, draft = drafter.propose(params, state.draft, noise.draft, config.law)
            state = replace(state, draft=draft)
    with jax.named_scope("verify"):
        tokens = jnp.concatenate([state.pending[:, None], proposal.tokens], axis=1)
        output = policy.apply(params.policy, tokens, state.visible, state.cache)
    after = replace(
        state, cache=output.cache, trips=state.trips + 1, rounds=state.rounds + (~state.done).astype(jnp.int32)
    )
    return _commit(after, drafter, output.logits, output.features, proposal, noise, config)


def _no_proposal(state: RoundState, policy: Policy) -> Proposal:
    rows = len(state.done)
    empty = jnp.zeros((rows, 0, policy.vocab_size), jnp.float32)
    return Proposal(jnp.zeros((rows, 0), jnp.int32), empty, jnp.zeros(rows, jnp.int32))


def _commit(
    state: RoundState,
    drafter: Drafter,
    logits: Float[Array, "B T V"],
    features: Float[Array, "B T F"],
    proposal: Proposal,
    noise: Noise,
    config: RolloutConfig,
) -> RoundState:
    """Verify a proposal of T - 1 tokens against the policy's logits, and record what is emitted.

    The one emission site: the first token after a prefill, accepted, recovered and bonus tokens all pass here. What is
    emitted is cut after the first stop token and at the length budget, once it is drawn, so that the law stays.
    """
    with jax.named_scope("commit"):
        log_p = process_logits(logits, config.law)
        verdict = VERIFIERS[config.verifier].verify(log_p, proposal.log_q, proposal.tokens, proposal.length, noise)
        column = jnp.arange(logits.shape[1])[None]
        accepted = verdict.accepted[:, None]
        drafts = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))
        tokens = jnp.where(column < accepted, drafts, verdict.token[:, None])

        stop = (column <= accepted) & _is_stop(tokens, config.stop_tokens)
        ends = jnp.where(stop.any(axis=1), jnp.argmax(stop, axis=1), verdict.accepted) + 1
        count = jnp.minimum(ends, config.max_new_tokens - state.emitted)
        count = jnp.where(state.done, 0, count).astype(jnp.int32)
        stopped = (stop & (column < count[:, None])).any(axis=1)
        emitted = state.emitted + count

        law = pick(log_p, tokens)
        full = pick(full_log_probs(logits, config.law), tokens) if config.law.truncates else law
        put = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at,)))
        kept = column[:, :-1] < jnp.minimum(verdict.accepted, count)[:, None]
        ending = _is_stop(proposal.tokens, config.stop_tokens).astype(jnp.int32)
        reachable = (jnp.cumsum(ending, axis=1) == ending) & ~state.done[:, None]
        most = jnp.minimum(proposal.length, config.max_new_tokens - state.emitted)
        offered = reachable & (column[:, :-1] < most[:, None])
        pending = jnp.take_along_axis(tokens, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
        return replace(
            state,
            emitted=emitted,
            pending=jnp.where(count > 0, pending, state.pending),
            done=state.done | stopped | (emitted == config.max_new_tokens),
            stopped=state.stopped | stopped,
            draft=drafter.observe(state.draft, features, tokens, count) if config.draft_length else (),
            tokens=put(state.tokens, tokens, state.emitted),
            law=put(state.law, law, state.emitted),
            full=put(state.full, full, state.emitted),
            drafted=_count(state.drafted, offered),
            accepted=_count(state.accepted, kept),
        )


def _count(total: Int[Array, "B K"], new: Bool[Array, "B k"]) -> Int[Array, "B K"]:
    return total + jnp.pad(new.astype(jnp.int32), ((0, 0), (0, total.shape[1] - new.shape[1])))


def _is_stop(tokens: Int[Array, "B T"], stop_tokens: tuple[int, ...]) -> Bool[Array, "B T"]:
    return jnp.isin(tokens, jnp.array(stop_tokens, jnp.int32))


def _finish(state: RoundState, config: RolloutConfig) -> Rollout:
    budget = config.max_new_tokens
    real = jnp.arange(budget)[None] < state.emitted[:, None]

    def cut(x: Array) -> Array:
        return jnp.where(real, x[:, :budget], jnp.zeros((), x.dtype))

    return Rollout(
        tokens=cut(state.tokens),
        lengths=state.emitted,
        stopped=state.stopped,
        law=cut(state.law),
        full=cut(state.full),
        drafted=state.drafted,
        accepted=state.accepted,
        rounds=state.rounds,
        trips=state.trips[None],
    )

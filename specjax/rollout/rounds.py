"""Speculative rounds: draft, verify, commit.

In a round, the drafter proposes K tokens. The policy runs once over the pending token and the proposal. The verifier
decides how many are accepted and draws the token after them. `commit` records the result. Each row advances by its own
number of tokens. Autoregressive sampling is the same code with K = 0.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer, UInt32

from specjax import kernels
from specjax.drafters import Drafter, Proposal
from specjax.drafters.base import DraftState
from specjax.rollout.plan import RolloutConfig
from specjax.rollout.stop_strings import FOUND
from specjax.rollout.turns import Turns
from specjax.sampling import full_log_probs, pick, process_logits, whole_rows
from specjax.types import Cache, Params, Policy, PolicyOutput, Writer, pytree
from specjax.verify import Noise, Verifier, find_verifier


@pytree
class RoundState:
    """State that a round reads and writes. Axis 0 of every array is the row; K and C as in `specjax.types`.

    All further fields accumulate those of the `Rollout`; arrays by token have K + 1 columns of slack.

    Attributes:
        sequence: int32, index of the rollout's sequence in this row.
        keys:     The sequence's noise key.
        prompt:   int32, prompt length.
        emitted:  int32, completion tokens so far. At 0, the pending token is the prompt's last.
        pending:  int32, the last emitted token, whose keys and values are not cached yet.
        done:     bool, stopped or out of budget.
        stopped:  bool, ended by a stop token or a stop string.
        cache:    The policy's cache. Its first `visible` positions count; it has room for a verification beyond them.
        draft:    The drafter's state.
        routes:   Experts of each position; the first `visible` count. None without a mixture of experts.
        stop_state: int32, state of `RolloutConfig.stop_automaton` after the emitted tokens; None without it.
        turns:    Turns of the rows; None without an environment.
    """

    sequence: Int[Array, "B"]
    keys: UInt32[Array, "B 2"]
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
    draft_outcome: Int[Array, "B C+K+1"]
    writer: Int[Array, "B C+K+1"]
    row_rounds: Int[Array, "B"]
    routes: Integer[Array, "B P+C+K+1 M A"] | None = None
    stop_state: Int[Array, "B"] | None = None
    turns: Turns | None = None

    @property
    def visible(self) -> Int[Array, "B"]:
        """Return the number of cached positions that count: all committed tokens but the pending one."""
        return self.prompt + self.emitted - 1

    @property
    def drawn(self) -> Int[Array, "B"]:
        """Return the number of completion tokens that the policy drew."""
        return self.emitted if self.turns is None else self.emitted - self.turns.observed

    @property
    def idle(self) -> Bool[Array, "B"]:
        """Return which rows emit nothing: those that are done, and those that wait for their environment."""
        return self.done if self.turns is None else self.done | self.turns.waiting

    def left(self, config: RolloutConfig) -> Int[Array, "B"]:
        """Return how many tokens may still be drawn, in this turn if there are turns."""
        left = config.max_new_tokens - self.emitted
        if self.turns is None or config.turn_tokens is None:
            return left
        return jnp.minimum(left, self.turns.began + config.turn_tokens - self.emitted)


@dataclass(frozen=True)
class Decoding:
    """Arguments that all rounds of a rollout share: networks as functions, their parameters, and the options."""

    policy: Policy
    drafter: Drafter
    params: Params
    config: RolloutConfig

    @property
    def verifier(self) -> Verifier:
        return find_verifier(self.config.verifier)


# (state, rounds so far) -> whether rounds stop here.
StopCondition = Callable[[RoundState, Int[Array, ""]], Bool[Array, ""]]


def rounds(decoding: Decoding, state: RoundState, k: int, stop: StopCondition) -> tuple[RoundState, Int[Array, ""]]:
    """Run rounds at draft length k until the stop condition holds. Return the state and the number of rounds."""
    if k and 0 in decoding.config.lengths:
        draft = decoding.drafter.catch_up(state.draft, state.visible, state.tokens, state.emitted)
        state = replace(state, draft=draft)
    return kernels.while_loop(
        lambda carry: ~stop(*carry),
        lambda carry: (round_once(decoding, carry[0], k), carry[1] + 1),
        (state, jnp.int32(0)),
    )


def round_once(decoding: Decoding, state: RoundState, k: int) -> RoundState:
    """Run one round: draft, verify, commit. Every row that is not done grows by 1 .. k + 1 tokens."""
    policy, config, params = decoding.policy, decoding.config, decoding.params
    noise = decoding.verifier.noise(state.keys, state.visible + 1, k, policy.vocab_size)
    proposal = no_proposal(len(state.done), policy)
    if k:
        with jax.named_scope("draft"):
            proposal, draft = decoding.drafter.propose(params, state.draft, noise.draft, config.law)
            state = replace(state, draft=draft)
    with jax.named_scope("verify"):
        tokens = jnp.concatenate([state.pending[:, None], proposal.tokens], axis=1)
        output = policy.apply(params.policy, tokens, state.visible, state.cache)
    state = replace(state, cache=output.cache, row_rounds=state.row_rounds + (~state.idle).astype(jnp.int32))
    routes = routes_of(policy, output)
    if state.routes is not None and routes is not None:
        state = replace(state, routes=put_rows(state.routes, routes, state.visible))
    features = decoding.drafter.features(output) if k else None
    return commit(decoding, state, output.logits, features, proposal, noise)


def routes_of(policy: Policy, output: PolicyOutput) -> Integer[Array, "B T M A"] | None:
    """Return the experts that the routers chose; None without a mixture of experts."""
    if policy.mixture is None or output.routing is None:
        return None
    return output.routing.chosen.astype(policy.mixture.dtype)


def no_proposal(rows: int, policy: Policy) -> Proposal:
    """Return the proposal of draft length 0."""
    empty = jnp.zeros((rows, 0, policy.vocab_size), jnp.float32)
    return Proposal(jnp.zeros((rows, 0), jnp.int32), empty, jnp.zeros(rows, jnp.int32))


def commit(
    decoding: Decoding,
    state: RoundState,
    logits: Float[Array, "B T V"],
    features: Float[Array, "B T F"] | None,
    proposal: Proposal,
    noise: Noise,
) -> RoundState:
    """Verify a proposal of T - 1 tokens against the policy's logits, and record what is emitted.

    Every emitted token passes here: the first after a prefill, accepted, recovered and bonus tokens. Tokens after the
    end of the completion or beyond the length budget are cut off after they are drawn, so that the law does not change.
    The drafter observes the emitted tokens if there are `features`, that is, unless the draft length is 0.
    """
    config, logits = decoding.config, whole_rows(logits)
    with jax.named_scope("commit"):
        log_p = process_logits(logits, config.law)
        verdict = decoding.verifier.verify(log_p, proposal.log_q, proposal.tokens, proposal.length, noise)
        column = jnp.arange(logits.shape[1])[None]
        drafts = jnp.pad(proposal.tokens, ((0, 0), (0, 1)))
        tokens = jnp.where(column < verdict.accepted[:, None], drafts, verdict.token[:, None])
        ends, stop_states = _ends(state, tokens, config)
        count, stopped = _cut(state, ends, verdict.accepted, config)
        stop_state = state.stop_state
        if stop_states is not None and stop_state is not None:
            stop_state = _last(stop_states, count, stop_state)
        emitted, turns = state.emitted + count, state.turns
        ended = spent = ~state.idle & ~stopped & (count == state.left(config))
        if turns is None:
            ended = spent | stopped
        else:
            turns = turns.after(stopped, spent)
        offered = _offered(state, proposal, config)
        kept = column[:, :-1] < jnp.minimum(verdict.accepted, count)[:, None]
        law = pick(log_p, tokens)
        return replace(
            state,
            emitted=emitted,
            pending=_last(tokens, count, state.pending),
            done=state.done | ended,
            stopped=state.stopped | stopped,
            draft=state.draft if features is None else decoding.drafter.observe(state.draft, features, tokens, count),
            tokens=put_rows(state.tokens, tokens, state.emitted),
            law=put_rows(state.law, law, state.emitted),
            full=put_rows(state.full, _full(logits, tokens, law, config), state.emitted),
            drafted=_count(state.drafted, offered),
            accepted=_count(state.accepted, kept),
            draft_outcome=put_rows(state.draft_outcome, _draft_outcome(proposal, offered, kept), state.emitted),
            writer=put_rows(state.writer, _writer(verdict.accepted, proposal.length, logits.shape[1]), state.emitted),
            stop_state=stop_state,
            turns=turns,
        )


def put_rows(into: Array, new: Array, at: Int[Array, "B"]) -> Array:
    """Return `into` with new positions written at at[b] of row b."""
    return jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice_in_dim(row, new, at, axis=0))(into, new, at)


def _last(new: Int[Array, "B T"], count: Int[Array, "B"], old: Int[Array, "B"]) -> Int[Array, "B"]:
    """Return the last of the first `count` columns of `new`; `old` where there are none."""
    last = jnp.take_along_axis(new, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    return jnp.where(count > 0, last, old)


def _ends(
    state: RoundState, tokens: Int[Array, "B T"], config: RolloutConfig
) -> tuple[Bool[Array, "B T"], Int[Array, "B T"] | None]:
    """Return whether each token ends the completion, and the state of the stop automaton after it, None without one.

    Only the first end of a row counts.
    """
    ends = jnp.isin(tokens, jnp.array(config.stop_tokens, jnp.int32))
    if config.stop_automaton is None or state.stop_state is None:
        return ends, None
    stop_states = config.stop_automaton.advance(state.stop_state, tokens)
    return ends | (stop_states == FOUND), stop_states


def _cut(
    state: RoundState, ends: Bool[Array, "B T"], accepted: Int[Array, "B"], config: RolloutConfig
) -> tuple[Int[Array, "B"], Bool[Array, "B"]]:
    """Return how many of the first accepted + 1 tokens are emitted, and whether the last one ends the completion."""
    column = jnp.arange(ends.shape[1])[None]
    stop = (column <= accepted[:, None]) & ends
    last = jnp.where(stop.any(axis=1), jnp.argmax(stop, axis=1), accepted)
    count = jnp.minimum(last + 1, state.left(config))
    count = jnp.where(state.idle, 0, count).astype(jnp.int32)
    return count, (stop & (column < count[:, None])).any(axis=1)


def _offered(state: RoundState, proposal: Proposal, config: RolloutConfig) -> Bool[Array, "B K"]:
    """Return which drafted tokens could be emitted: not those after an end of the completion or beyond the budget."""
    stop = _ends(state, proposal.tokens, config)[0].astype(jnp.int32)
    reachable = (jnp.cumsum(stop, axis=1) == stop) & ~state.idle[:, None]
    most = jnp.minimum(proposal.length, state.left(config))
    return reachable & (jnp.arange(stop.shape[1])[None] < most[:, None])


def _full(
    logits: Float[Array, "B T V"], tokens: Int[Array, "B T"], law: Float[Array, "B T"], config: RolloutConfig
) -> Float[Array, "B T"]:
    """Return the tokens' log-probs under temperature alone."""
    return pick(full_log_probs(logits, config.law), tokens) if config.law.truncates else law


def _draft_outcome(proposal: Proposal, offered: Bool[Array, "B K"], kept: Bool[Array, "B K"]) -> Int[Array, "B T"]:
    """Return `Rollout.draft_outcome` of a verification."""
    outcome = (offered.astype(jnp.int32) + kept.astype(jnp.int32))[:, :1]
    if proposal.predicted is not None:
        outcome = jnp.where(proposal.predicted[:, None], outcome, 0)
    return jnp.pad(outcome, ((0, 0), (0, offered.shape[1] + 1 - outcome.shape[1])))


def _writer(accepted: Int[Array, "B"], length: Int[Array, "B"], width: int) -> Int[Array, "B T"]:
    """Return `Rollout.writer` of a verification, in `width` columns of which the first accepted + 1 count."""
    last = jnp.where(accepted < length, Writer.RECOVERED, jnp.where(length == 0, Writer.POLICY, Writer.BONUS))
    return jnp.where(jnp.arange(width)[None] < accepted[:, None], Writer.DRAFT, last[:, None]).astype(jnp.int8)


def _count(total: Int[Array, "B K"], new: Bool[Array, "B k"]) -> Int[Array, "B K"]:
    return total + jnp.pad(new.astype(jnp.int32), ((0, 0), (0, total.shape[1] - new.shape[1])))

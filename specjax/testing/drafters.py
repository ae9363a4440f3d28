"""Drafters for tests: the policy itself with scaled logits, and a fixed table."""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from specjax.drafters import Drafter, Proposal
from specjax.drafters.base import Flag
from specjax.drafters.lookup import one_hot_proposal
from specjax.sampling import SamplingLaw, process_logits, sample
from specjax.types import Cache, Params, Policy, Prompts


class PolicyDraftState(NamedTuple):
    """The drafter's cache of `length` positions, and the tokens of the last verification that are not cached yet."""

    cache: Cache
    length: Array
    tokens: Array
    waiting: Array


@dataclass(frozen=True)
class PolicyDrafter(Drafter):
    """Drafts with the policy over a separate cache, with its logits multiplied by `params.draft["scale"]`.

    At scale 1 the draft equals the policy, between 0 and 1 it is flatter, at -1 it prefers the least likely tokens.
    """

    policy: Policy

    def start(
        self, params: Params, prompts: Prompts, features: Array, width: int, drafting: Flag = True
    ) -> PolicyDraftState:
        rows = len(prompts.lengths)
        zeros = jnp.zeros(rows, jnp.int32)
        cache = self.policy.init_cache(rows, prompts.tokens.shape[1] + 2 * width)
        cache = self.policy.apply(params.policy, prompts.tokens, zeros, cache).cache
        assert cache is not None
        return PolicyDraftState(cache, prompts.lengths, jnp.zeros((rows, width), jnp.int32), zeros)

    def propose(
        self, params: Params, state: PolicyDraftState, gumbel: Array, law: SamplingLaw
    ) -> tuple[Proposal, PolicyDraftState]:
        output = self.policy.apply(params.policy, state.tokens, state.length, state.cache)
        last = jnp.maximum(state.waiting - 1, 0)[:, None, None]
        logits = jnp.take_along_axis(output.logits, last, axis=1)[:, 0]
        length = state.length + state.waiting
        tokens, log_q = [], []
        for i in range(gumbel.shape[1]):
            if i:
                output = self.policy.apply(params.policy, tokens[-1][:, None], length + i - 1, output.cache)
                logits = output.logits[:, 0]
            log_q.append(process_logits(logits * params.draft["scale"].astype(logits.dtype), law))
            tokens.append(sample(log_q[-1], gumbel[:, i]))
        assert output.cache is not None
        proposal = Proposal(jnp.stack(tokens, 1), jnp.stack(log_q, 1), jnp.full_like(length, gumbel.shape[1]))
        return proposal, PolicyDraftState(output.cache, length, state.tokens, jnp.zeros_like(state.waiting))

    def observe(self, state: PolicyDraftState, features: Array, tokens: Array, emitted: Array) -> PolicyDraftState:
        missing = state.tokens.shape[1] - tokens.shape[1]
        return state._replace(tokens=jnp.pad(tokens, ((0, 0), (0, missing))), waiting=emitted)


@dataclass(frozen=True)
class TableDrafter(Drafter):
    """Proposes table[t], table[table[t]], .. after token t. It is deterministic; its state is the last token."""

    table: tuple[int, ...]

    def start(self, params: Params, prompts: Prompts, features: Array, width: int, drafting: Flag = True) -> Array:
        return jnp.zeros(len(prompts.lengths), jnp.int32)

    def catch_up(self, state: Array, visible: Array, tokens: Array, emitted: Array) -> Array:
        return jnp.take_along_axis(tokens, emitted[:, None] - 1, axis=1)[:, 0]

    def propose(self, params: Params, state: Array, gumbel: Array, law: SamplingLaw) -> tuple[Proposal, Array]:
        tokens = [jnp.array(self.table)[state]]
        while len(tokens) < gumbel.shape[1]:
            tokens.append(jnp.array(self.table)[tokens[-1]])
        length = jnp.full_like(state, gumbel.shape[1])
        return one_hot_proposal(jnp.stack(tokens, axis=1), length, len(self.table)), state

    def observe(self, state: Array, features: Array, tokens: Array, emitted: Array) -> Array:
        last = jnp.take_along_axis(tokens, jnp.maximum(emitted - 1, 0)[:, None], axis=1)[:, 0]
        return jnp.where(emitted > 0, last, state)

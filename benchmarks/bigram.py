"""A draft that costs next to nothing: what last followed this token in its own row, as n-gram drafting does."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from specjax.drafters import Drafter, Proposal
from specjax.drafters.base import DraftLoss
from specjax.sampling import SamplingLaw, full_log_probs
from specjax.types import Params, PolicyOutput, Prompts


class BigramState(NamedTuple):
    """A row's memory.

    following: int32 [B, V], what came last after each token, that token itself where nothing has.
    last:      int32 [B], the pending token. told: int32 [B], positions before it.
    ready:     bool [B], that no token was missed since.
    """

    following: Int[Array, "B V"]
    last: Int[Array, "B"]
    told: Int[Array, "B"]
    ready: Bool[Array, "B"]


@dataclass(frozen=True)
class BigramDrafter(Drafter):
    """The `Drafter` without parameters whose proposals are certain: log_q is one-hot."""

    vocab_size: int

    def start(self, params: Params, prompts: Prompts, features: Array, width: int) -> BigramState:
        rows, length = prompts.tokens.shape
        table = jnp.tile(jnp.arange(self.vocab_size)[None], (rows, 1))
        following = _follow(table, prompts.tokens[:, :-1], prompts.tokens[:, 1:], prompts.lengths - 1)
        last = jnp.take_along_axis(prompts.tokens, prompts.lengths[:, None] - 1, axis=1)[:, 0]
        return BigramState(following, last, prompts.lengths - 1, prompts.lengths > 0)

    def align(self, state: BigramState, visible: Array) -> BigramState:
        return state._replace(told=visible, ready=state.ready & (state.told == visible))

    def propose(
        self, params: Params, state: BigramState, gumbel: Array, law: SamplingLaw
    ) -> tuple[Proposal, BigramState]:
        tokens, last = [], state.last
        for _ in range(gumbel.shape[1]):
            last = jnp.take_along_axis(state.following, last[:, None], axis=1)[:, 0]
            tokens.append(last)
        drafted = jnp.stack(tokens, axis=1)
        log_q = jnp.where(jax.nn.one_hot(drafted, self.vocab_size) > 0, 0.0, -jnp.inf)
        return Proposal(drafted, log_q, jnp.where(state.ready, gumbel.shape[1], 0)), state

    def observe(self, state: BigramState, features: Array, tokens: Array, emitted: Array) -> BigramState:
        before = jnp.concatenate([state.last[:, None], tokens[:, :-1]], axis=1)
        # Of a row that missed something, the first of these tokens follows one that is not known.
        following = _follow(state.following, before, tokens, jnp.where(state.ready, emitted, 0))
        last = jnp.take_along_axis(tokens, jnp.maximum(emitted - 1, 0)[:, None], axis=1)[:, 0]
        return BigramState(
            following, jnp.where(emitted > 0, last, state.last), state.told + emitted, state.ready | (emitted > 0)
        )

    def loss(self, params: Params, tokens: Array, output: PolicyOutput, mask: Array, law: SamplingLaw) -> DraftLoss:
        """Nothing to train. The overlap is the policy's probability of what would have been proposed."""
        law_of_next = jnp.exp(full_log_probs(output.logits, law))

        def row(tokens: Array, probabilities: Array, counts: Array) -> Array:
            def step(table: Array, at: tuple[Array, Array, Array, Array]) -> tuple[Array, Array]:
                token, after, probability, counted = at
                overlap = jnp.where(counted, probability[table[token]], 0.0)
                return table.at[token].set(after), overlap

            start = jnp.arange(self.vocab_size)
            return jax.lax.scan(step, start, (tokens[:-1], tokens[1:], probabilities[:-1], counts[1:]))[1]

        overlap = jax.vmap(row)(tokens, law_of_next, mask)
        return DraftLoss(jnp.float32(0), jnp.pad(overlap, ((0, 0), (1, 0))))


def _follow(table: Int[Array, "B V"], tokens: Array, after: Array, count: Int[Array, "B"]) -> Int[Array, "B V"]:
    """The table with the first `count` pairs of each row, the later ones over the earlier."""

    def row(table: Array, tokens: Array, after: Array, count: Array) -> Array:
        def put(i: Array, table: Array) -> Array:
            return table.at[jnp.where(i < count, tokens[i], len(table))].set(after[i], mode="drop")

        return jax.lax.fori_loop(0, len(tokens), put, table)

    return jax.vmap(row)(table, tokens, after, count)

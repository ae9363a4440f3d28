"""Prompt lookup (Saxena 2023; vLLM's n-gram drafting): draft what followed the last tokens earlier in the row."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array

from specjax.drafters.base import Anchors, Drafter, DraftLoss, Flag, Proposal
from specjax.drafters.lookup import (
    MatchLength,
    Text,
    check_lengths,
    encode,
    last_tokens,
    look_up,
    one_hot_proposal,
    prompt_text,
    with_completion,
    with_tokens,
)
from specjax.log_probs import laws
from specjax.options import check_options
from specjax.sampling import SamplingLaw, pick
from specjax.types import Params, PolicyOutput, Prompts, TextCache


@dataclass(frozen=True)
class NGramDrafter(Drafter):
    """Proposes the tokens that followed the last occurrence of the longest repeated n-gram.

    It proposes nothing if fewer than min_n tokens repeat. It has no parameters, and proposals are a function of the
    committed text. (vLLM takes the first occurrence.)

    vocab_size: V of the policy.
    min_n:      fewest tokens of a match.
    max_n:      most tokens that are compared.
    """

    vocab_size: int
    min_n: MatchLength = 3
    max_n: MatchLength = 8

    reads_only_tokens = True

    def __post_init__(self) -> None:
        check_options(self)
        check_lengths(self.min_n, self.max_n)

    def start(self, params: Params, prompts: Prompts, features: Array, width: int, drafting: Flag = True) -> Text:
        return prompt_text(prompts)

    def catch_up(self, state: Text, visible: Array, tokens: Array, emitted: Array) -> Text:
        return with_completion(state, visible, tokens, emitted)

    def propose(self, params: Params, state: Text, gumbel: Array, law: SamplingLaw) -> tuple[Proposal, Text]:
        match = look_up(state.cache.tokens[:, None], last_tokens(state, self.max_n), self.min_n, gumbel.shape[1])
        return one_hot_proposal(match.tokens, match.known, self.vocab_size), state

    def observe(self, state: Text, features: Array, tokens: Array, emitted: Array) -> Text:
        return with_tokens(state, tokens, emitted)

    def loss(
        self,
        params: Params,
        tokens: Array,
        output: PolicyOutput,
        mask: Array,
        law: SamplingLaw,
        anchors: Anchors | None = None,
    ) -> DraftLoss:
        """Return a loss of 0 and the overlap: the policy's probability of the token it would propose, 0 if none.

        Runs a lookup for every token, which is quadratic in the length. Meant for measurements.
        """
        policy, index = laws(params.policy, output, law), jnp.arange(tokens.shape[1])

        def proposed(t: Array) -> tuple[Array, Array]:
            text = encode(tokens, jnp.broadcast_to(index[None] <= t, tokens.shape))
            end = last_tokens(Text(TextCache(text), jnp.full(len(tokens), t + 1)), self.max_n)
            match = look_up(text[:, None], end, self.min_n, 1)
            return match.tokens[:, 0], mask[:, t + 1] & (match.known > 0)

        found, counts = (x.T for x in jax.lax.map(proposed, index[:-1]))
        log_p = policy.by_position(
            lambda source, found: pick(policy.log_probs(source), found), policy.source[:, :-1], found
        )
        return DraftLoss(jnp.float32(0), jnp.pad(jnp.where(counts, jnp.exp(log_p), 0.0), ((0, 0), (1, 0))))

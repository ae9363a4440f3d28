"""Draft from earlier completions of the same prompt: of the row itself, of its siblings, and of earlier rollouts.

The lookup is from SuffixDecoding (arXiv 2411.04975): its draft length depends on the match. The choice of texts is from
DAS (arXiv 2511.13841) and RhymeRL (arXiv 2508.18588): RL returns to its prompts, and samples of a group are alike.
Nothing is trained. Reading the texts of other rows keeps the law: a draft depends only on committed tokens, and these
are independent of the noise that this row has yet to draw.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from specjax.drafters.base import Drafter, Flag, Proposal
from specjax.drafters.lookup import (
    Found,
    MatchLength,
    Text,
    check_lengths,
    encode,
    last_tokens,
    longer_match,
    look_up,
    one_hot_proposal,
    prompt_text,
    with_completion,
    with_tokens,
)
from specjax.options import DraftLength, NonNegative, Positive, Weight, check_options
from specjax.sampling import SamplingLaw
from specjax.types import Params, Prompts, PyTree, Rollout


class HistoryState(NamedTuple):
    """Texts that a row searches. `finished` and `earlier` hold prompt and completion, encoded as in a `Text`.

    Attributes:
        own:      Text of the row.
        group:    int32 [B], prompt id + 1; rows below 1 have no siblings.
        finished: int32 [B, siblings, P + C], siblings that have ended; [B, 0, 1] if the rollout reports none.
        earlier:  int32 [B, kept, P + C], completions of earlier rollouts; [B, 0, 1] without a memory.
    """

    own: Text
    group: Int[Array, "B"]
    finished: Int[Array, "B G S"]
    earlier: Int[Array, "B M S"]


@dataclass(frozen=True)
class HistoryDrafter(Drafter):
    """Proposes the tokens that followed the longest match in the row's own text, its siblings' or earlier completions.

    Ties go to the row's own text, then to its siblings, then to the newest earlier completion. A row searches its
    siblings in the batch. If sequences leave the batch before the rollout ends, it also searches siblings that have
    ended, of which each row then holds copies: 4 * siblings * (P + C) bytes.

    `Params.memory` is int32 [prompts, kept, C]: the newest `kept` completions of each prompt by prompt id, encoded as
    in a `Text` and replicated over the mesh, 4 * prompts * kept * C bytes on every device. Without a memory
    (`memory=()`, as for prompts outside the training set) a row searches only its own text and its siblings'.
    Completions of prompts with a negative id are neither kept nor searched.

    Attributes:
        vocab_size: V of the policy.
        min_n:      Fewest tokens of a match.
        max_n:      Most tokens that are compared.
        kept:       Completions kept per prompt; of a larger group, the first ones.
        siblings:   Most siblings searched in the batch, and most of those that have ended.
        factor:     A draft has at most matched * factor + offset tokens.
        offset:     See `factor`.
    """

    vocab_size: int
    min_n: MatchLength = 3
    max_n: MatchLength = 8
    kept: Positive = 4
    siblings: NonNegative = 8
    factor: Weight = 1.0
    offset: DraftLength = 0

    def __post_init__(self) -> None:
        check_options(self)
        check_lengths(self.min_n, self.max_n)

    @property
    def memory(self) -> "HistoryMemory":
        return HistoryMemory(self.kept)

    def start(
        self, params: Params, prompts: Prompts, features: Array, width: int, drafting: Flag = True
    ) -> HistoryState:
        zeros = jnp.zeros((len(prompts.lengths), 0, 1), jnp.int32)
        earlier = zeros
        if jax.tree.leaves(params.memory):
            earlier = _with_prompt(prompts, _of_prompts(params.memory, prompts.id))
        return HistoryState(prompt_text(prompts), prompts.id + 1, zeros, earlier)

    def observe_finished(self, state: HistoryState, prompts: Prompts, finished: Array) -> HistoryState:
        order = jnp.argsort(~jnp.any(finished > 0, axis=2), axis=1, stable=True)[:, : self.siblings]
        completions = jnp.take_along_axis(finished, order[:, :, None], axis=1)
        return state._replace(finished=_with_prompt(prompts, jnp.where(prompts.id[:, None, None] < 0, 0, completions)))

    def catch_up(self, state: HistoryState, visible: Array, tokens: Array, emitted: Array) -> HistoryState:
        return state._replace(own=with_completion(state.own, visible, tokens, emitted))

    def propose(
        self, params: Params, state: HistoryState, gumbel: Array, law: SamplingLaw
    ) -> tuple[Proposal, HistoryState]:
        end, count = last_tokens(state.own, self.max_n), gumbel.shape[1]
        siblings = _of_siblings(state, self.siblings)
        texts = state.own.cache.tokens[:, None], siblings, state.finished, state.earlier
        match: Found = look_up(texts[0], end, self.min_n, count)
        for others in texts[1:]:
            if others.shape[1]:
                match = longer_match(match, look_up(others, end, self.min_n, count))
        most = jnp.floor(self.factor * match.matched.astype(jnp.float32)).astype(jnp.int32) + self.offset
        return one_hot_proposal(match.tokens, jnp.minimum(match.known, most), self.vocab_size), state

    def observe(self, state: HistoryState, features: Array, tokens: Array, emitted: Array) -> HistoryState:
        return state._replace(own=with_tokens(state.own, tokens, emitted))


@dataclass(frozen=True)
class HistoryMemory:
    """Memory of the newest `kept` completions of each prompt, encoded as in a `Text`."""

    kept: int

    def blank(self, prompts: int, max_new_tokens: int) -> Int[Array, "prompts kept C"]:
        return jnp.zeros((prompts, self.kept, max_new_tokens), jnp.int32)

    def remember(self, memory: PyTree, prompts: Prompts, rollout: Rollout) -> PyTree:
        """Return the memory with the rollout's completions put before earlier ones; () stays ()."""
        if not jax.tree.leaves(memory):
            return memory
        column = jnp.arange(rollout.tokens.shape[1])[None]
        new = encode(rollout.tokens, column < rollout.lengths[:, None])
        new = new.reshape(len(prompts.id), -1, new.shape[1])
        newest = jnp.concatenate([new, _of_prompts(memory, prompts.id)], axis=1)[:, : self.kept]
        return memory.at[_index(memory, prompts.id)].set(newest, mode="drop")


def _with_prompt(prompts: Prompts, completions: Int[Array, "B M C"]) -> Int[Array, "B M S"]:
    """Return each encoded completion appended to the encoded prompt of its row."""
    text = prompt_text(prompts).cache.tokens
    prompt = jnp.pad(text, ((0, 0), (0, prompts.tokens.shape[1] + completions.shape[2] - text.shape[1])))

    def put(prompt: Array, completion: Array, length: Array) -> Array:
        return jax.lax.dynamic_update_slice(prompt, completion, (length,))

    return jax.vmap(jax.vmap(put, in_axes=(None, 0, None)))(prompt, completions, prompts.lengths)


def _index(memory: Int[Array, "prompts kept C"], ids: Int[Array, "N"]) -> Int[Array, "N"]:
    """Return the rows of the memory that hold these prompts; an index out of bounds for ids below 0."""
    return jnp.where(ids < 0, len(memory), ids)


def _of_prompts(memory: Int[Array, "prompts kept C"], ids: Int[Array, "N"]) -> Int[Array, "N kept C"]:
    return memory.at[_index(memory, ids)].get(mode="fill", fill_value=0)


def _of_siblings(state: HistoryState, count: int) -> Int[Array, "B M S"]:
    """Return the texts of the first `count` rows with the same prompt; empty texts if there are fewer."""
    group, rows = state.group, len(state.group)
    order = jnp.argsort(group, stable=True)
    ordered = group[order]
    place = jnp.searchsorted(ordered, group)[:, None] + jnp.arange(min(count, rows))[None]
    siblings = order[jnp.minimum(place, rows - 1)]
    same = (place < rows) & (group[siblings] == group[:, None]) & (group[:, None] > 0)
    return jnp.where(same[..., None], state.own.cache.tokens[siblings], 0)

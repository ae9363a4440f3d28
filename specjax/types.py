"""The pytrees that travel between the rooms, and the functions by which the algorithms reach a network.

Axis names used throughout the project:

    N  prompts            P  padded prompt length     V  vocabulary
    G  samples a prompt   C  completion budget        F  width of the drafter's features
    R  sequences, N * G   T  tokens in one forward    D  width of the residual stream
    B  rows of a batch    S  cached positions         K  draft length

Sequence r is sample r % G of prompt r // G. Prompts, completions and cache rows are left-aligned: the index of a
token in its row is its position.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, dataclass_transform, no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

PyTree = Any
T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def pytree(cls: type[T]) -> type[T]:
    """A frozen dataclass that is a pytree. Its fields go unchecked at run time: JAX also fills them with specs, shapes
    and sentinels.
    """
    return no_type_check(jax.tree_util.register_dataclass(dataclass(frozen=True)(cls)))


class LayerCache(NamedTuple):
    """Keys and values of one layer, each [slot, kv_head, length, head_dim]."""

    k: Array
    v: Array


Cache = tuple[LayerCache, ...]


class TextCache(NamedTuple):
    """Tokens by position, int32 [slot, length], for a drafter that looks things up (specjax.drafters.lookup)."""

    tokens: Array


@pytree
class Params:
    """The parameters of both networks; `draft` is an empty dict where the drafter has none.

    memory: what the drafter keeps of earlier rollouts, by prompt id, which no optimiser touches; () for most drafters,
            and for prompts whose ids are not those of training.
    """

    policy: PyTree
    draft: PyTree
    memory: PyTree = ()


@pytree
class TrainState:
    """All that an update reads and writes. Donated to each step.

    step:       int32 scalar, updates so far; with the seed it keys all noise.
    optimizer:  the optimiser states, arranged as the parameters they belong to.
    reference:  the parameters of the policy that KL is measured against, which no update changes, or None.
    drafting:   what draft lengths are chosen by (specjax.cost.Drafting), or None where there is but one.
    adaptation: what the draft's training goes by (specjax.train.adaptation), or None without a draft to train.
    """

    step: Int[Array, ""]
    params: Params
    optimizer: Params
    reference: PyTree | None
    drafting: PyTree | None = None
    adaptation: PyTree | None = None


@pytree
class Prompts:
    """A batch of prompts. `id` names a prompt in the host's table of answers and keys its noise: unique in a batch."""

    tokens: Int[Array, "N P"]
    lengths: Int[Array, "N"]
    id: Int[Array, "N"]


@pytree
class ChunkedLogits:
    """Stands for logits that were left out: unembed(params, hidden) gives them, for `chunk` positions of each row at a
    time. Both are static.
    """

    unembed: Callable[[PyTree, Array], Array] = field(metadata={"static": True})
    chunk: int = field(metadata={"static": True})


@pytree
class PolicyOutput:
    """Result of one forward of the policy.

    logits:   [B, T, V] in the compute dtype; [B, 0, V] where they were left out.
    features: [B, T, F], the concatenated residual streams that the drafter reads.
    hidden:   [B, T, D] after the final norm.
    cache:    the cache with the T tokens written, or None where none was given.
    chunked:  how to get the logits that were left out (specjax.log_probs); None where they are there.
    """

    logits: Float[Array, "B T V"]
    features: Float[Array, "B T F"]
    hidden: Float[Array, "B T D"]
    cache: Cache | None
    chunked: ChunkedLogits | None = None


@dataclass(frozen=True)
class Policy:
    """A causal language model as functions.

    apply:      (params, tokens [B, T], start [B], cache=None, logits_at=None, visible_from=None) -> PolicyOutput. Row b
                holds positions start[b] .. start[b] + T - 1. With a cache, those positions are written and each token
                attends to the cached positions up to its own; without, to the earlier tokens of its own row.
                With logits_at [B], logits are [B, 1, V]: of that token of each row. With visible_from [B], cached
                positions before it are not attended to. With logits=False they are left out, [B, 0, V]: called so,
                without a cache, where training has a `logit_chunk`, which a policy may do without.
    init_cache: (rows, length) -> Cache of zeros.
    embedding:  params -> [V, D], the table a drafter may borrow.
    unembed:    (params, hidden [B, T, D]) -> logits [B, T, V]: the vocabulary head, which a drafter may borrow too.
    dtype:      the compute dtype, to which the rollout casts the parameters once a step.
    """

    apply: Callable[..., PolicyOutput]
    init_cache: Callable[[int, int], Cache]
    embedding: Callable[[PyTree], Array]
    unembed: Callable[[PyTree, Array], Array]
    vocab_size: int
    dtype: jnp.dtype


class Writer(enum.IntEnum):
    """How a token of a completion came to be there. The law is the same for all of them.

    NOBODY:    after the end of the completion.
    POLICY:    drawn where nothing was drafted: the first token of a row, and all of them at draft length 0.
    DRAFT:     drafted and accepted.
    RECOVERED: drawn in the place of the drafted token that was refused.
    BONUS:     drawn after a draft that was accepted whole.
    """

    NOBODY = 0
    POLICY = 1
    DRAFT = 2
    RECOVERED = 3
    BONUS = 4


@pytree
class Reward:
    """The score of each sequence; NaN where scoring failed, which masks the sequence. `correct` is 0 or 1.

    parts: by name, what the value is put together from, [R] each, whose means are logged; None where it is one thing.
    """

    value: Float[Array, "R"]
    correct: Float[Array, "R"]
    parts: dict[str, Float[Array, "R"]] | None = None


@pytree
class Rollout:
    """Completions of R = N * G sequences, without their prompts. Only tokens and lengths are required of a fork.

    tokens:   int32 [R, C], the completion, stop token included; zero from `lengths` on.
    lengths:  int32 [R], 0 .. C.
    stopped:  bool [R], ended by a stop token (False: by the length budget).
    law:      float32 [R, C], log-prob of each token under the processed law it was drawn from.
    full:     float32 [R, C], its log-prob under temperature alone: what ratios and KL use.
    drafted:  int32 [R, K], how often position i of a draft could still be emitted.
    accepted: int32 [R, K], how often it was accepted and emitted.
    row_rounds:    int32 [R], verifications while the row was live.
    loop_rounds:   int32 [shards, phases], rounds of each shard, and draft_length: the draft length they ran at.
    plain_rounds:  int32 [shards, phases], rounds that draft length 0 would have taken for as much, at least; where
                   sequences wait, for what the mean row gained.
    lookup_counts: int32 [shards, 2, K], `drafted` and `accepted` as a lookup would have had them at places of the
                   completions that were in slots to the end: of a drafter without parameters, where draft lengths are
                   chosen (specjax.rollout.lookup_acceptance).
    draft_outcome: int32 [R, C], what became of position 1 of a draft at the place of each token: 0 where none stood
                   there, 1 where it was refused, 2 where it was accepted. Only of drafts whose acceptance training
                   predicts (`Proposal.predicted`). Read beside `drafted`.
    writer:        int8 [R, C], who wrote each token: a `Writer`.
    reward:   what the reward function said of each sequence, whether it is learnt from or not.
    batch:    what a training step made of it to learn from (specjax.train.batch), as its losses read it. The step
              fills both in, and no rollout function does.
    """

    tokens: Int[Array, "R C"]
    lengths: Int[Array, "R"]
    stopped: Bool[Array, "R"] | None = None
    law: Float[Array, "R C"] | None = None
    full: Float[Array, "R C"] | None = None
    drafted: Int[Array, "R K"] | None = None
    accepted: Int[Array, "R K"] | None = None
    row_rounds: Int[Array, "R"] | None = None
    loop_rounds: Int[Array, "shards phases"] | None = None
    draft_length: Int[Array, "shards phases"] | None = None
    plain_rounds: Int[Array, "shards phases"] | None = None
    lookup_counts: Int[Array, "shards 2 K"] | None = None
    draft_outcome: Int[Array, "R C"] | None = None
    writer: Int[Array, "R C"] | None = None
    reward: Reward | None = None
    batch: PyTree | None = None

    @property
    def verifications(self) -> Int[Array, "R"]:
        """`row_rounds`, or without it those of plain decoding; the first token of a row comes from its prefill."""
        return jnp.maximum(self.lengths - 1, 0) if self.row_rounds is None else self.row_rounds

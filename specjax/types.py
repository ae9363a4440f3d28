"""The pytrees that pass between packages, and `Policy`, the interface of a network.

Axis names used throughout the project:

    N  prompts            P  padded prompt length     V  vocabulary
    G  samples a prompt   C  completion budget        F  width of the drafter's features
    R  sequences, N * G   T  tokens in one forward    D  width of the residual stream
    B  rows of a batch    S  cached positions         K  draft length
    E  experts            M  layers with experts      A  experts of a token

Sequence r is sample r % G of prompt r // G. Prompts, completions and cache rows are left-aligned: the index of a
token in its row is its position.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar, dataclass_transform, no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer

from specjax.short_repr import short_repr

PyTree = Any
EightBit = Literal["int8", "fp8"]
T = TypeVar("T")


@dataclass_transform(frozen_default=True, eq_default=False)
def pytree(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass that is a pytree. Its repr counts arrays; two are equal only if they are one.

    Its field types are not checked at run time: JAX also fills the fields with specs, shapes and sentinels.
    """
    cls.__repr__ = short_repr
    return no_type_check(jax.tree_util.register_dataclass(dataclass(frozen=True, eq=False)(cls)))


class LayerCache(NamedTuple):
    """Keys and values of one layer, each [slot, kv_head, length, head_dim]."""

    k: Array
    v: Array


Cache = tuple[LayerCache, ...]


class TextCache(NamedTuple):
    """Tokens by position, int32 [slot, length], for a drafter that looks up earlier text (specjax.drafters.lookup)."""

    tokens: Array


@pytree
class Params:
    """Parameters of both networks; `draft` is an empty dict if the drafter has none.

    memory: what the drafter keeps of earlier rollouts, by prompt id. No optimiser touches it. () for most drafters, and
            for prompts whose ids are not those of training.
    base:   frozen parameters of the policy, if `policy` holds adapters to them (specjax.adapters). () if `policy`
            holds all of its parameters, as it does in a rollout function.
    """

    policy: PyTree
    draft: PyTree
    memory: PyTree = ()
    base: PyTree = ()


@pytree
class TrainState:
    """State that an update reads and writes. Donated to each step.

    Attributes:
        step:       int32 scalar, updates so far; all noise is keyed by it and the seed.
        params:     Parameters of both networks.
        optimizer:  Optimiser states, arranged like the parameters.
        reference:  Policy parameters that KL is measured against, never updated; {} for `params.base`; or None.
        drafting:   State from which draft lengths are chosen (specjax.cost.Drafting); None if there is only one length.
        adaptation: State that controls draft training (specjax.train.draft.schedule); None without a draft to train.
        ahead:      Rollouts that wait for their updates (specjax.asynchronous), oldest first; on their own mesh.
        carried:    Groups that the newest rollout left (specjax.carry_over), on the mesh that
                    generates. None without carry-over.
        teacher:    Parameters of a teacher that is a network of its own, never updated; None without.
    """

    step: Int[Array, ""]
    params: Params
    optimizer: Params
    reference: PyTree | None
    drafting: PyTree | None = None
    adaptation: PyTree | None = None
    ahead: "tuple[Ahead, ...]" = ()
    carried: "CarryOver | None" = None
    teacher: PyTree | None = None


@pytree
class Hints:
    """Text that a teacher sees and the policy does not (specjax.train.hints), left-aligned. Length 0: none."""

    tokens: Int[Array, "N H"]
    lengths: Int[Array, "N"]


@pytree
class Prompts:
    """A batch of prompts.

    id:      unique within a batch. The host looks up answers by it, and a prompt's noise is keyed by it.
    carried: what earlier rollouts wrote of the sequences (specjax.carry_over). The rollout goes on with them, and
             ends before all are done. None: it begins all sequences and ends them.
    hints:   worked solutions, for a teacher. None without.
    """

    tokens: Int[Array, "N P"]
    lengths: Int[Array, "N"]
    id: Int[Array, "N"]
    carried: "Rollout | None" = None
    hints: Hints | None = None


@pytree
class Unembedding:
    """Placeholder for logits that were left out: unembed(params, hidden) computes them where they are read.

    All fields are static. logit_chunk: as in `TrainConfig`.
    """

    unembed: Callable[[PyTree, Array], Array] = field(metadata={"static": True})
    vocab_size: int = field(metadata={"static": True})
    logit_chunk: int | None = field(metadata={"static": True})


class Mixture(NamedTuple):
    """Sizes of a mixture of experts: in each of M `layers`, `active` (A) of `experts` (E) see a token."""

    layers: int
    experts: int
    active: int

    @property
    def dtype(self) -> jnp.dtype:
        """Return the smallest dtype that holds the number of an expert."""
        return jnp.dtype("uint8" if self.experts <= 256 else "uint16")


@pytree
class Routing:
    """Result of the routers of a mixture of experts in one forward.

    chosen: int32 [B, T, M, A], experts of highest probability, also where the forward was told to use others.
    probs:  float32 [B, T, M, E], probability of each expert.
    """

    chosen: Int[Array, "B T M A"]
    probs: Float[Array, "B T M E"]


@pytree
class PolicyOutput:
    """Result of one forward of the policy.

    Attributes:
        logits:      [B, T, V] in the compute dtype; [B, 0, V] in training, which leaves them out.
        features:    [B, T, F], the concatenated residual streams that the drafter reads.
        hidden:      [B, T, D] after the final norm.
        cache:       The cache with the T tokens written; None if none was given.
        unembedding: Placeholder for logits that were left out (specjax.log_probs); None otherwise.
        routing:     Result of the routers; None without a mixture of experts.
    """

    logits: Float[Array, "B T V"]
    features: Float[Array, "B T F"]
    hidden: Float[Array, "B T D"]
    cache: Cache | None
    unembedding: Unembedding | None = None
    routing: Routing | None = None


@dataclass(frozen=True)
class Policy:
    """A causal language model, as functions.

    Attributes:
        apply:      (params, tokens [B, T], start [B], cache=None, logits_at=None, visible_from=None) -> PolicyOutput.
                    Row b holds positions start[b] .. start[b] + T - 1. With a cache, those positions are written, and
                    each token attends to the cached positions up to its own. Without one, tokens attend to the earlier
                    tokens of their row. logits_at [B]: compute logits of that token of each row alone, [B, 1, V].
                    visible_from [B]: cached positions before it are not attended to. routes [B, T, M, A]: experts to
                    use in place of those that the routers choose. Only policies with a mixture get it.
        init_cache: (rows, length) -> Cache of zeros.
        embedding:  params -> [V, D], the embedding table, which a drafter may share.
        unembed:    (params, hidden [B, T, D]) -> logits [B, T, V]: the vocabulary head, which a drafter may share.
        vocab_size: V.
        dtype:      Compute dtype, to which the rollout casts the parameters once per step.
        mixture:    Sizes of the mixture of experts; None without one.
        eight_bit:  Format of the kernels in the rollout's copy (specjax.quantization); None: `dtype`. Any format
                    changes the law that the rollout samples from.
        merged:     Whether adapters are merged into the kernels of the rollout's copy (specjax.adapters). Rounding then
                    changes the law.
        packs:      Whether `apply` takes packed rows, with `shared` and no cache (specjax.shared_prompts). Training
                    then computes a prompt once for its group.
    """

    apply: Callable[..., PolicyOutput]
    init_cache: Callable[[int, int], Cache]
    embedding: Callable[[PyTree], Array]
    unembed: Callable[[PyTree, Array], Array]
    vocab_size: int
    dtype: jnp.dtype
    mixture: Mixture | None = None
    eight_bit: EightBit | None = None
    merged: bool = False
    packs: bool = False

    __repr__ = short_repr


class Writer(enum.IntEnum):
    """Origin of a token of a completion. The law is the same for all of them.

    Attributes:
        NOBODY:    Padding after the end of the completion.
        POLICY:    Drawn where nothing was drafted: the first token of a row, and every token at draft length 0.
        DRAFT:     Drafted and accepted.
        RECOVERED: Drawn from the residual in place of a rejected draft token.
        BONUS:     Drawn after a draft of which every token was accepted.
        ENVIRONMENT: Not drawn: an observation between two turns (specjax.rollout.turns).
    """

    NOBODY = 0
    POLICY = 1
    DRAFT = 2
    RECOVERED = 3
    BONUS = 4
    ENVIRONMENT = 5


class Ending(enum.IntEnum):
    """Why a sequence ended.

    Attributes:
        GOING:     It has not ended.
        STOP:      Its environment was done with it.
        LENGTH:    At the budget of its tokens, or of the tokens of one turn.
        TURNS:     At the limit of turns.
        FAILED:    Its environment failed.
        TIMED_OUT: Its environment took too long.
        FULL:      An observation did not fit into the budget.
    """

    GOING = 0
    STOP = 1
    LENGTH = 2
    TURNS = 3
    FAILED = 4
    TIMED_OUT = 5
    FULL = 6


@pytree
class Reward:
    """Score of each sequence. NaN: scoring failed, and the sequence is masked. `correct` is 0 or 1.

    parts: components of the value by name, [R] each; their means are logged. None: the value has no components.
    """

    value: Float[Array, "R"]
    correct: Float[Array, "R"]
    parts: dict[str, Float[Array, "R"]] | None = None


@pytree
class Rollout:
    """Completions of R = N * G sequences, without their prompts. A rollout function of your own must fill in only
    `tokens` and `lengths`.

    Attributes:
        tokens:        int32 [R, C], the completion with what ends it; zero from `lengths` on.
        lengths:       int32 [R], 0 .. C.
        stopped:       bool [R], ended by a stop token or string (False: by the length budget, or not yet). With an
                       environment: False if `ending` is LENGTH or FULL.
        law:           float32 [R, C], log-prob of each token under the processed law it was drawn from.
        full:          float32 [R, C], log-prob under temperature alone, which ratios and KL use.
        drafted:       int32 [R, K], number of drafts whose token at position i could be emitted.
        accepted:      int32 [R, K], number of drafts whose token at position i was accepted and emitted.
        row_rounds:    int32 [R], verifications while the row was live.
        loop_rounds:   int32 [shards, phases], rounds of each shard.
        draft_length:  int32 [shards, phases], draft length of these rounds.
        plain_rounds:  int32 [shards, phases], rounds that draft length 0 would have taken for the same progress: of the
                       slowest live row, or of the mean row while sequences wait (specjax.rollout.phase.plain_rounds).
        lookup_counts: int32 [shards, 2, K], `drafted` and `accepted` of a lookup, counted after the rollout on the
                       completions in slots at its end (specjax.rollout.lookup_acceptance). Only for a drafter without
                       parameters whose draft length is chosen automatically.
        draft_outcome: int32 [R, C], result at position 1 of the draft that began at this token: 0 no draft began here,
                       1 rejected, 2 accepted. Only drafts whose acceptance training predicts (`Proposal.predicted`).
                       Filled in together with `drafted`.
        writer:        int8 [R, C], the `Writer` of each token.
        sampled:       bool [R, C], tokens that the policy drew: the others were observed between turns, and train
                       nothing. None: all before `lengths`.
        ending:        int8 [R], the `Ending` of each sequence. None without an environment, as the next two.
        turns:         int32 [R], turns of each sequence that a stop token or string ended.
        returns:       float32 [R], sum of the rewards that the environment gave; NaN if it failed or took too long.
        done:          bool [R], ended. The others go on in the next rollout. Required with carry-over, None without it.
        resumed_at:    int32 [R], number of tokens that earlier rollouts wrote. Set by the training step; None without
                       carry-over.
        began:         int32 [R], step in which the sequence began, which keys its noise. Set as `resumed_at` is.
        versions:      int32 [R, C], for each token, the number of updates that the policy which wrote it had seen.
                       Set as `resumed_at` is.
        routes:        uint8 or uint16 [R, P + C, M, A], experts of each token of prompt and completion, left-aligned,
                       as the verifying forward chose them. Zero from the last token on, which no forward has seen.
                       None without a mixture of experts.
        reward:        Result of the reward function, also for sequences that are not trained on. Set by the training
                       step, not by rollout functions.
        batch:         The training batch (specjax.train.batch) as the losses read it. Set by the training step too.
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
    sampled: Bool[Array, "R C"] | None = None
    ending: Int[Array, "R"] | None = None
    turns: Int[Array, "R"] | None = None
    returns: Float[Array, "R"] | None = None
    done: Bool[Array, "R"] | None = None
    resumed_at: Int[Array, "R"] | None = None
    began: Int[Array, "R"] | None = None
    versions: Int[Array, "R C"] | None = None
    routes: Integer[Array, "R P+C M A"] | None = None
    reward: Reward | None = None
    batch: PyTree | None = None

    @property
    def verifications(self) -> Int[Array, "R"]:
        """Return `row_rounds`, or without it the verifications of plain decoding.

        The first token of a row needs none: it comes from the prefill.
        """
        return jnp.maximum(self.lengths - 1, 0) if self.row_rounds is None else self.row_rounds

    @property
    def written(self) -> Int[Array, "R"]:
        """Return how many tokens the policy drew of each sequence in this rollout: all but those carried over."""
        if self.sampled is not None:
            real = jnp.arange(self.tokens.shape[1])[None] < self.lengths[:, None]
            return jnp.sum(self.sampled & real, axis=1, dtype=jnp.int32)
        return self.lengths if self.resumed_at is None else self.lengths - self.resumed_at


@pytree
class Ahead:
    """A rollout that was begun before its step.

    versions: int32 for each network that generated it, number of updates that it had seen.
    drafting: state from which its draft lengths were chosen; None if there is only one length.
    """

    prompts: Prompts
    rollout: Rollout
    versions: Params
    drafting: PyTree | None = None


@pytree
class CarryOver:
    """Groups that go on in the next rollout, or wait for a later step. Each stays in its rows.

    prompts:   prompts of that rollout.
    kept:      bool [N], groups that go on.
    sequences: what rollouts wrote so far, with `began` and `versions`, of all rows, also of those that do not go on.
    """

    prompts: Prompts
    kept: Bool[Array, "N"]
    sequences: Rollout

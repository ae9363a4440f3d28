"""Draft all tokens of a round in one forward, as DFlash (arXiv 2602.06036) and DSpark (arXiv 2607.05147) do.

The draft reads the policy's features of the positions before the anchor, the last committed token, and drafts the
tokens after it. Its cache holds true features only: nothing is repaired after a rejection.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from specjax.cache import resize, tokens_at
from specjax.chunks import by_position
from specjax.drafters.base import Anchors, DraftLoss, Proposal, at_anchors, everywhere
from specjax.drafters.distillation import Objective, PassDecay, acceptance, binary_cross_entropy, divergence
from specjax.drafters.head import FeatureDrafter, HeadState
from specjax.log_probs import laws
from specjax.sampling import SamplingLaw, full_log_probs, process_logits, sample
from specjax.short_repr import short_repr
from specjax.types import Cache, EightBit, Params, PolicyOutput, Prompts

# Slots of each row that the loss computes at a time.
LOSS_SLOTS = 128


@dataclass(frozen=True)
class BlockHead:
    """A block draft, as functions of the parameters of both networks. A row has A anchors, each with K drafted tokens.

    Attributes:
        features:   PolicyOutput -> features [B, T, F].
        write:      (params, features [B, T, F], cache, start [B]) -> cache with the features of positions start, ..
        block:      (params, tokens [B, A], place [B, A], K, cache, visible_from [B], start [B]) -> (states [B, A, K, D]
                    for `unembed`, cache). Drafts after the tokens at `place`, each from the cached positions
                    visible_from .. place - 1. The slots are written to the cache from `start` on.
        unembed:    (params, states [B, N, D]) -> logits [B, N, Vd], Vd the size of the draft's vocabulary.
        follow:     (params, tokens [..]) -> what the logits of the next drafted token gain by these, [.., Vd]. None
                    without a Markov head.
        confidence: (params, states [B, N, D], tokens [B, N]) -> logits [B, N] of the acceptance of what is drafted from
                    the states after the tokens. Only the loss reads them. None without a confidence head.
        init_cache: (rows, length) -> Cache.
        size:       Largest K.
        slots:      Positions that a block of `size` writes.
        eight_bit:  Format of its kernels in the rollout's copy (specjax.quantization); None: the compute dtype.
    """

    features: Callable[[PolicyOutput], Array]
    write: Callable[[Params, Array, Cache, Array], Cache]
    block: Callable[[Params, Array, Array, int, Cache, Array, Array], tuple[Array, Cache]]
    unembed: Callable[[Params, Array], Array]
    follow: Callable[[Params, Array], Array] | None
    confidence: Callable[[Params, Array, Array], Array] | None
    init_cache: Callable[[int, int], Cache]
    size: int
    slots: int
    eight_bit: EightBit | None = None


@dataclass(frozen=True)
class BlockDrafter(FeatureDrafter):
    """Drafts with a block draft.

    Attributes:
        head:       The draft's functions.
        vocab_size: V of the policy.
        target_ids: int32 [Vd], the policy's id of each token of a reduced draft vocabulary, ascending; None: all of V.
        decay:      Weight of each drafted position in the loss, relative to the one before, in (0, 1].
        objective:  Loss of each position (specjax.drafters.distillation).
    """

    head: BlockHead
    vocab_size: int
    target_ids: np.ndarray | None = None
    decay: PassDecay = 0.8
    objective: Objective = "cross_entropy"

    __repr__ = short_repr

    @property
    def stride(self) -> int:
        """Return half the size of a block: each token is then drafted about twice."""
        return max(self.head.size // 2, 1)

    def fill(self, params: Params, prompts: Prompts, features: Array, cache: Cache) -> Cache:
        return self.head.write(params, features, cache, jnp.zeros(len(prompts.lengths), jnp.int32))

    def write(self, params: Params, state: HeadState, features: Array, following: Array) -> Cache:
        return self.head.write(params, features, state.cache, state.length)

    def propose(
        self, params: Params, state: HeadState, gumbel: Float[Array, "B K V"], law: SamplingLaw
    ) -> tuple[Proposal, HeadState]:
        """Draft K tokens in one forward, after caching the features of the last verification.

        Raises ValueError if K is above the size of the block.
        """
        head, count = self.head, gumbel.shape[1]
        if count > head.size:
            raise ValueError(f"draft_length = {count}: must be at most {head.size}, the size of the draft's block")
        cache = self.write(params, state, state.features, state.tokens)
        length = state.length + state.waiting
        anchor = tokens_at(state.tokens, jnp.maximum(state.waiting - 1, 0)[:, None])
        states, cache = head.block(params, anchor, length[:, None], count, cache, state.visible_from, length)
        logits, noise = head.unembed(params, states[:, 0]), self._of_draft(gumbel)
        if head.follow is None:
            log_q = process_logits(logits, law)
            tokens = self._to_policy_ids(sample(log_q, noise))
        else:
            token, chosen, log_q = anchor[:, 0], [], []
            for i in range(count):
                log_q.append(process_logits(logits[:, i] + head.follow(params, token), law))
                token = self._to_policy_ids(sample(log_q[-1], noise[:, i]))
                chosen.append(token)
            tokens, log_q = jnp.stack(chosen, 1), jnp.stack(log_q, 1)
        # A row that `catch_up` has just restarted has no feature to draft from.
        drafted = jnp.where(state.waiting > 0, count, 0)
        proposal = Proposal(tokens, self._to_policy_vocab(log_q), drafted, predicted=state.visible_from == 0)
        return proposal, state._replace(cache=cache)

    def loss(
        self,
        params: Params,
        tokens: Array,
        output: PolicyOutput,
        mask: Array,
        law: SamplingLaw,
        anchors: Anchors | None = None,
    ) -> DraftLoss:
        """Return the weighted mean over the drafted positions, and the overlap of the first.

        A confidence head adds its cross entropy with the overlap of each position. As in speculators and DeepSpec, its
        gradient also reaches the layers that it reads, but not the overlap.
        """
        chosen = anchors or everywhere(tokens)
        losses, overlaps = self._positions(params, tokens, output, mask, law, chosen)
        weight = self.decay ** jnp.arange(self.head.size, dtype=jnp.float32)
        each = jnp.sum(losses * weight[None, None], axis=-1) / jnp.sum(weight)
        return DraftLoss(jnp.sum(each * chosen.weight), at_anchors(chosen, overlaps[..., 0], tokens.shape[1]))

    def overlaps(
        self, params: Params, tokens: Array, output: PolicyOutput, mask: Array, law: SamplingLaw, positions: int
    ) -> Float[Array, "N B T"]:
        """Return the overlap of each position of the blocks, at the tokens that it predicts."""
        length, count = tokens.shape[1], min(positions, self.head.size)
        _, overlaps = self._positions(params, tokens, output, mask, law, everywhere(tokens))
        return jnp.stack([jnp.pad(overlaps[..., i], ((0, 0), (2 + i, 0)))[:, :length] for i in range(count)])

    def _positions(
        self, params: Params, tokens: Array, output: PolicyOutput, mask: Array, law: SamplingLaw, anchors: Anchors
    ) -> tuple[Float[Array, "B N K"], Float[Array, "B N K"]]:
        """Return divergence and overlap of each drafted position; 0 from the first token that does not count.

        `anchors.place` are the first drafted tokens. The anchor of a block, in the sense of the papers, is the token
        before. Blocks are computed some at a time, so that memory grows with the length of a row. Each drafted token is
        conditioned on the true tokens before it.
        """
        head, rows, length = self.head, len(tokens), tokens.shape[1]
        policy = laws(params.policy, output, law)
        context = head.write(params, self.features(output), head.init_cache(rows, length), jnp.zeros(rows, jnp.int32))
        first, end = jnp.zeros(rows, jnp.int32), jnp.full(rows, length, jnp.int32)
        ahead = jnp.arange(head.size)[None, None]

        def block(first_drafted: Array) -> tuple[Array, Array]:
            anchor, count = first_drafted - 1, first_drafted.shape[1]
            cache = resize(context, count * head.slots)
            states, _ = head.block(params, tokens_at(tokens, anchor), anchor, head.size, cache, first, end)
            states = states.reshape(rows, -1, states.shape[-1])
            drafted = (first_drafted[:, :, None] + ahead).reshape(rows, -1)
            logits, before = head.unembed(params, states), tokens_at(tokens, drafted - 1)
            if head.follow is not None:
                logits += head.follow(params, before)
            log_p = self._of_draft(policy.log_probs(tokens_at(policy.source, drafted - 1)))
            log_q = full_log_probs(logits, law)
            counts = jnp.cumprod(tokens_at(mask, drafted).astype(jnp.float32).reshape(rows, count, -1), axis=-1)
            lost, overlap = divergence(self.objective, log_p, log_q), acceptance(log_p, log_q)
            if head.confidence is not None:
                lost += binary_cross_entropy(overlap, head.confidence(params, states, before))
            return lost.reshape(counts.shape) * counts, overlap.reshape(counts.shape) * counts

        most = min(policy.chunk(rows, LOSS_SLOTS) or LOSS_SLOTS, LOSS_SLOTS)
        return by_position(block, max(most // head.slots, 1), anchors.place)

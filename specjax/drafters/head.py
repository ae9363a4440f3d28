"""Draft with a head on the policy, as EAGLE-3 (Li et al. 2025, arXiv 2503.01840) and native MTP heads do.

The head combines the feature of position t with the token at t + 1 and predicts the token at t + 2. Its first step in a
round reads the policy's features. Later steps read the hidden state that the head returned.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.cache import View, decode_view, extended, resize, tokens_at
from specjax.drafters.base import Anchors, Drafter, DraftLoss, Flag, Proposal, at_anchors, everywhere, start_if
from specjax.drafters.distillation import Objective, PassDecay, Passes, acceptance, divergence
from specjax.drafters.training_time_test import pass_view
from specjax.log_probs import laws
from specjax.options import check_options
from specjax.sampling import SamplingLaw, full_log_probs, process_logits, sample
from specjax.short_repr import short_repr
from specjax.types import Cache, EightBit, Params, PolicyOutput, Prompts


@dataclass(frozen=True)
class DraftHead:
    """A head, as functions of the parameters of both networks. Vd is the size of the draft vocabulary.

    It reads the parts that it shares with the policy (embedding, vocabulary head) through stop_gradient.

    Attributes:
        features:   PolicyOutput -> features [B, T, F].
        fuse:       (params, features [B, T, F]) -> hidden [B, T, D].
        step:       (params, hidden [B, T, D], tokens [B, T], cache, view, returned_at) -> (state [B, T, D] for
                    `unembed`, hidden [B, T, D] to feed back, cache). With returned_at [B, N], both are [B, N, D]: only
                    of these tokens.
        unembed:    (params, state [B, T, D]) -> logits [B, T, Vd], of each position by itself.
        init_cache: (rows, length) -> Cache.
        window:     Number of last positions that its attention sees; None: all.
        eight_bit:  Format of its kernels in the rollout's copy (specjax.quantization); None: the compute dtype.
    """

    features: Callable[[PolicyOutput], Array]
    fuse: Callable[[Params, Array], Array]
    step: Callable[[Params, Array, Array, Cache, View, Array | None], tuple[Array, Array, Cache]]
    unembed: Callable[[Params, Array], Array]
    init_cache: Callable[[int, int], Cache]
    window: int | None = None
    eight_bit: EightBit | None = None


class HeadState(NamedTuple):
    """The head's cache, and the committed features and tokens that the next round's first step writes into it.

    Attributes:
        cache:        Keys and values. Positions visible_from .. length - 1 are computed from true features.
        visible_from: int32 [B].
        length:       int32 [B].
        features:     [B, K+1, F], from the last verification, not yet cached; positions length, length + 1, ..
        tokens:       int32 [B, K+1], the token that follows each feature's position.
        waiting:      int32 [B], 0 .. K+1, number of these features and tokens that are committed.
    """

    cache: Cache
    visible_from: Int[Array, "B"]
    length: Int[Array, "B"]
    features: Float[Array, "B T F"]
    tokens: Int[Array, "B T"]
    waiting: Int[Array, "B"]


class FeatureDrafter(Drafter):
    """A drafter with a `head` that reads the policy's features. Its state is a `HeadState`; subclasses draft."""

    head: Any
    vocab_size: int
    target_ids: np.ndarray | None

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def eight_bit(self) -> EightBit | None:
        return self.head.eight_bit

    def init_cache(self, rows: int, length: int, width: int) -> Cache:
        # A round writes `width` features, and what it drafts after the committed ones among them.
        return self.head.init_cache(rows, length + 2 * width)

    def features(self, output: PolicyOutput) -> Array:
        return self.head.features(output)

    def start(self, params: Params, prompts: Prompts, features: Array, width: int, drafting: Flag = True) -> HeadState:
        return start_if(drafting, partial(self._start, params, prompts, features, width))

    def _start(self, params: Params, prompts: Prompts, features: Array, width: int) -> HeadState:
        """Fill the cache with all prompt positions but the last, whose following token is not known yet."""
        rows, length = prompts.tokens.shape
        zeros = jnp.zeros(rows, jnp.int32)
        return HeadState(
            cache=resize(self.fill(params, prompts, features, self.head.init_cache(rows, length)), 2 * width),
            visible_from=zeros,
            length=prompts.lengths - 1,
            features=jnp.zeros((rows, width, features.shape[-1]), features.dtype),
            tokens=jnp.zeros((rows, width), jnp.int32),
            waiting=zeros,
        )

    @abstractmethod
    def fill(self, params: Params, prompts: Prompts, features: Array, cache: Cache) -> Cache:
        """Return the cache with the features of the prompts' positions."""

    def catch_up(self, state: HeadState, visible: Array, tokens: Array, emitted: Array) -> HeadState:
        missed = state.length + state.waiting != visible
        return state._replace(
            visible_from=jnp.where(missed, visible, state.visible_from),
            length=jnp.where(missed, visible, state.length),
            waiting=jnp.where(missed, 0, state.waiting),
        )

    def observe(self, state: HeadState, features: Array, tokens: Array, emitted: Array) -> HeadState:
        missing = state.tokens.shape[1] - tokens.shape[1]
        emits, features = emitted > 0, jnp.pad(features, ((0, 0), (0, missing), (0, 0)))
        return state._replace(
            # `propose` has cached what waited.
            length=jnp.where(emits, state.length + state.waiting, state.length),
            features=jnp.where(emits[:, None, None], features, state.features),
            tokens=jnp.where(emits[:, None], jnp.pad(tokens, ((0, 0), (0, missing))), state.tokens),
            waiting=jnp.where(emits, emitted, state.waiting),
        )

    def append(
        self, params: Params, state: HeadState, features: Array, tokens: Array, count: Array, visible: Array
    ) -> HeadState:
        """Cache the features that wait and all new ones but the last, which waits for the next round."""
        current = (count > 0) & (state.length + state.waiting == visible)
        features = extended(state.features, features, state.waiting)
        following = extended(state.tokens, tokens, state.waiting)
        last = state.waiting + count - 1
        width = state.tokens.shape[1]

        def waits(x: Array, old: Array) -> Array:
            kept = jnp.pad(tokens_at(x, last[:, None]), ((0, 0), (0, width - 1), *((0, 0),) * (x.ndim - 2)))
            return jnp.where(current.reshape(-1, *(1,) * (x.ndim - 1)), kept, old)

        return state._replace(
            # Other rows write again what waits, which their next round does too.
            cache=self.write(params, state, features, following),
            length=jnp.where(current, state.length + last, state.length),
            features=waits(features, state.features),
            tokens=waits(following, state.tokens),
            waiting=jnp.where(current, 1, state.waiting),
        )

    @abstractmethod
    def write(self, params: Params, state: HeadState, features: Array, following: Array) -> Cache:
        """Return the cache with features written from `state.length` on. following: the token after each."""

    def _of_draft(self, x: Float[Array, "*batch V"]) -> Float[Array, "*batch Vd"]:
        """Return what stands at the tokens of the draft's vocabulary."""
        return x if self.target_ids is None else x.at[..., self.target_ids].get(mode="promise_in_bounds")

    def _to_policy_ids(self, tokens: Int[Array, "*batch"]) -> Int[Array, "*batch"]:
        """Return the policy's ids of tokens of the draft's vocabulary."""
        return tokens if self.target_ids is None else jnp.asarray(self.target_ids)[tokens]

    def _to_policy_vocab(self, log_q: Float[Array, "B K Vd"]) -> Float[Array, "B K V"]:
        """Return log_q over the policy's vocabulary, minus infinity outside the draft's.

        Written as a gather, so that it fuses with its readers: a round reads only a few numbers and one row of it.
        """
        if self.target_ids is None:
            return log_q
        known, place = np.zeros(self.vocab_size, bool), np.zeros(self.vocab_size, np.int32)
        known[self.target_ids], place[self.target_ids] = True, np.arange(len(self.target_ids))
        return jnp.where(known[None, None], log_q.at[..., place].get(mode="promise_in_bounds"), -jnp.inf)


@dataclass(frozen=True)
class HeadDrafter(FeatureDrafter):
    """Drafts with a head on the policy.

    Attributes:
        head:       The head's functions.
        vocab_size: V of the policy.
        target_ids: int32 [Vd], the policy's id of each token of a reduced draft vocabulary, ascending; None: all of V.
        unroll:     Passes of the training-time test, 1 .. 7. Every pass after the first feeds the head its own hidden
                    state, as drafting does.
        decay:      Weight of each pass in the loss, relative to the one before, in (0, 1].
        objective:  Loss of each pass (specjax.drafters.distillation).
    """

    head: DraftHead
    vocab_size: int
    target_ids: np.ndarray | None = None
    unroll: Passes = 3
    decay: PassDecay = 0.8
    objective: Objective = "cross_entropy"

    __repr__ = short_repr

    def fill(self, params: Params, prompts: Prompts, features: Array, cache: Cache) -> Cache:
        following = jnp.roll(prompts.tokens, -1, axis=1)
        rows, length = following.shape
        view = decode_view(jnp.zeros(rows, jnp.int32), length, length, window=self.head.window)
        return self.head.step(params, self.head.fuse(params, features), following, cache, view, None)[2]

    def write(self, params: Params, state: HeadState, features: Array, following: Array) -> Cache:
        view = decode_view(
            state.length, following.shape[1], state.cache[0].k.shape[2], state.visible_from, self.head.window
        )
        return self.head.step(params, self.head.fuse(params, features), following, state.cache, view, None)[2]

    def propose(
        self, params: Params, state: HeadState, gumbel: Float[Array, "B K V"], law: SamplingLaw
    ) -> tuple[Proposal, HeadState]:
        """Draft K tokens. The first step also caches the true features of the last verification, in one pass."""
        hidden = self.head.fuse(params, state.features)
        room = state.cache[0].k.shape[2]
        view = decode_view(state.length, state.tokens.shape[1], room, state.visible_from, self.head.window)
        last = jnp.maximum(state.waiting - 1, 0)
        read, hidden, cache = self.head.step(params, hidden, state.tokens, state.cache, view, last[:, None])
        length = state.length + state.waiting
        noise, tokens, log_q = self._of_draft(gumbel), [], []
        for i in range(gumbel.shape[1]):
            if i:
                view = decode_view(length + i - 1, 1, room, state.visible_from, self.head.window)
                read, hidden, cache = self.head.step(params, hidden, tokens[-1][:, None], cache, view, None)
            logits = self.head.unembed(params, read)
            log_q.append(process_logits(logits[:, 0], law))
            tokens.append(self._to_policy_ids(sample(log_q[-1], noise[:, i])))
        # A row that `catch_up` has just restarted has no feature to draft from.
        drafted = jnp.where(state.waiting > 0, gumbel.shape[1], 0)
        log_q = self._to_policy_vocab(jnp.stack(log_q, 1))
        proposal = Proposal(jnp.stack(tokens, 1), log_q, drafted, predicted=state.visible_from == 0)
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
        """Return the weighted sum of the training-time test's passes, and the overlap of the first."""
        chosen, loss, overlaps = anchors or everywhere(tokens), jnp.float32(0), []
        for depth, (lost, overlap) in enumerate(self._passes(params, tokens, output, mask, law, chosen)):
            loss += self.decay**depth * jnp.sum(lost * chosen.weight)
            overlaps.append(overlap)
        return DraftLoss(loss, at_anchors(chosen, overlaps[0], tokens.shape[1]))

    def overlaps(
        self, params: Params, tokens: Array, output: PolicyOutput, mask: Array, law: SamplingLaw, positions: int
    ) -> Float[Array, "N B T"]:
        """Return the overlaps of so many passes of the training-time test, at the tokens that they predict."""
        several, length = replace(self, unroll=positions), tokens.shape[1]
        passes = enumerate(several._passes(params, tokens, output, mask, law, everywhere(tokens)))
        return jnp.stack([jnp.pad(overlap, ((0, 0), (2 + i, 0)))[:, :length] for i, (_, overlap) in passes])

    def _passes(
        self, params: Params, tokens: Array, output: PolicyOutput, mask: Array, law: SamplingLaw, anchors: Anchors
    ) -> Iterator[tuple[Float[Array, "B A"], Float[Array, "B A"]]]:
        """Yield the divergence and the overlap of each pass; 0 where the predicted token does not count, or position 1.

        The training-time test (section 3.2): pass 0 reads the policy's features, pass i the state that pass i - 1
        returned, over the same true tokens one position on. In pass i, index t reads token t + 1 + i and predicts
        token t + 2 + i, whose law the policy gives at t + 1 + i, at the rollout temperature.

        The indices are those of the anchors. Pass 0 computes the keys of all others too, and nothing else of them.
        """
        rows, length = len(tokens), tokens.shape[1] - 2
        starts, reads = anchors.place - 2, self.unroll * anchors.place.shape[1]
        policy = laws(params.policy, output, law).for_reads(reads)
        ids = slice(None) if self.target_ids is None else self.target_ids

        def compare(target: Array, read: Array) -> tuple[Array, Array]:
            log_p, log_q = policy.log_probs(target)[..., ids], full_log_probs(self.head.unembed(params, read), law)
            return divergence(self.objective, log_p, log_q), acceptance(log_p, log_q)

        hidden = self.head.fuse(params, self.features(output)[:, :length])
        cache, following = self.head.init_cache(rows, 0), tokens[:, 1:-1]
        for depth in range(self.unroll):
            view = pass_view(starts, length, depth, self.head.window)
            cache = resize(cache, hidden.shape[1])
            read, hidden, cache = self.head.step(params, hidden, following, cache, view, starts if not depth else None)
            predicted, target = anchors.place + depth, tokens_at(policy.source, anchors.place + depth - 1)
            counts = tokens_at(mask, anchors.place) & tokens_at(mask, predicted)
            losses, overlaps = policy.by_position(compare, target, read)
            yield losses * counts.astype(jnp.float32), overlaps * counts.astype(jnp.float32)
            following = tokens_at(tokens, predicted)

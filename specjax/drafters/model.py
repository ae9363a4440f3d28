"""Draft with a small model of the same vocabulary (Leviathan et al. 2023, Chen et al. 2023)."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from specjax.cache import extended, resize, tokens_at
from specjax.drafters.base import Anchors, Drafter, DraftLoss, Flag, Proposal, at_anchors, everywhere, start_if
from specjax.drafters.distillation import Objective, acceptance, divergence
from specjax.log_probs import laws, teacher_forced
from specjax.sampling import SamplingLaw, process_logits, sample
from specjax.types import Cache, EightBit, Params, Policy, PolicyOutput, Prompts


class ModelState(NamedTuple):
    """The model's cache, and the tokens that the first draft step of the next round adds to it.

    Attributes:
        cache:        The model's cache. Positions visible_from .. length - 1 count.
        visible_from: int32 [B].
        length:       int32 [B].
        tokens:       int32 [B, K+1], emitted by the last verification; at positions length, length + 1, ..
        waiting:      int32 [B], 0 .. K+1, number of these tokens that count.
    """

    cache: Cache
    visible_from: Int[Array, "B"]
    length: Int[Array, "B"]
    tokens: Int[Array, "B T"]
    waiting: Int[Array, "B"]


@dataclass(frozen=True)
class ModelDrafter(Drafter):
    """Drafts with an independent model, whose parameters are `params.draft`. It reads nothing of the policy.

    model:     has the policy's vocabulary; its `apply` takes `visible_from`.
    objective: loss that distillation minimises (specjax.drafters.distillation).
    """

    model: Policy
    objective: Objective = "cross_entropy"

    reads_only_tokens = True

    @property
    def eight_bit(self) -> EightBit | None:
        return self.model.eight_bit

    def init_cache(self, rows: int, length: int, width: int) -> Cache:
        # Draft steps write up to `width` tokens after the pending one, more than the policy's cache has room for.
        return self.model.init_cache(rows, length + width)

    def start(self, params: Params, prompts: Prompts, features: Array, width: int, drafting: Flag = True) -> ModelState:
        return start_if(drafting, partial(self._start, params, prompts, width))

    def _start(self, params: Params, prompts: Prompts, width: int) -> ModelState:
        rows = len(prompts.lengths)
        zeros = jnp.zeros(rows, jnp.int32)
        cache = self.model.init_cache(rows, prompts.tokens.shape[1])
        cache = self.model.apply(params.draft, prompts.tokens, zeros, cache, prompts.lengths - 1).cache
        return ModelState(
            cache=resize(cache, width),
            visible_from=zeros,
            length=prompts.lengths,
            tokens=jnp.zeros((rows, width), jnp.int32),
            waiting=zeros,
        )

    def catch_up(self, state: ModelState, visible: Array, tokens: Array, emitted: Array) -> ModelState:
        # After rounds at draft length 0, the row has not seen the pending token either.
        missed = state.length + state.waiting != visible + 1
        return state._replace(
            visible_from=jnp.where(missed, visible + 1, state.visible_from),
            length=jnp.where(missed, visible + 1, state.length),
            waiting=jnp.where(missed, 0, state.waiting),
        )

    def propose(
        self, params: Params, state: ModelState, gumbel: Array, law: SamplingLaw
    ) -> tuple[Proposal, ModelState]:
        """Draft K tokens. The first step also caches, in one pass, all tokens that the last verification emitted."""
        last = jnp.maximum(state.waiting - 1, 0)
        output = self.model.apply(params.draft, state.tokens, state.length, state.cache, last, state.visible_from)
        length = state.length + state.waiting
        tokens, log_q = [], []
        for i in range(gumbel.shape[1]):
            if i:
                output = self.model.apply(
                    params.draft, tokens[-1][:, None], length + i - 1, output.cache, None, state.visible_from
                )
            log_q.append(process_logits(output.logits[:, 0], law))
            tokens.append(sample(log_q[-1], gumbel[:, i]))
        # A row that `catch_up` has just restarted has no token to draft from.
        drafted = jnp.where(state.waiting > 0, gumbel.shape[1], 0)
        proposal = Proposal(jnp.stack(tokens, 1), jnp.stack(log_q, 1), drafted, state.visible_from == 0)
        cache = output.cache
        assert cache is not None
        return proposal, state._replace(cache=cache)

    def observe(self, state: ModelState, features: Array, tokens: Array, emitted: Array) -> ModelState:
        missing = state.tokens.shape[1] - tokens.shape[1]
        emits = emitted > 0
        return state._replace(
            # `propose` has cached what waited.
            length=jnp.where(emits, state.length + state.waiting, state.length),
            tokens=jnp.where(emits[:, None], jnp.pad(tokens, ((0, 0), (0, missing))), state.tokens),
            waiting=jnp.where(emits, emitted, state.waiting),
        )

    def append(
        self, params: Params, state: ModelState, features: Array, tokens: Array, count: Array, visible: Array
    ) -> ModelState:
        """Cache the tokens that wait and all new ones but the last, which waits for the next round."""
        current = (count > 0) & (state.length + state.waiting == visible + 1)
        joined, last = extended(state.tokens, tokens, state.waiting), state.waiting + count - 1
        zeros = jnp.zeros_like(count)
        output = self.model.apply(params.draft, joined, state.length, state.cache, zeros, state.visible_from)
        kept = jnp.pad(tokens_at(joined, last[:, None]), ((0, 0), (0, state.tokens.shape[1] - 1)))
        assert output.cache is not None
        return state._replace(
            cache=output.cache,
            length=jnp.where(current, state.length + last, state.length),
            tokens=jnp.where(current[:, None], kept, state.tokens),
            waiting=jnp.where(current, 1, state.waiting),
        )

    def loss(
        self,
        params: Params,
        tokens: Array,
        output: PolicyOutput,
        mask: Array,
        law: SamplingLaw,
        anchors: Anchors | None = None,
    ) -> DraftLoss:
        """Return the objective against the policy's law at the rollout temperature. Runs a forward of the model."""
        policy, chosen = laws(params.policy, output, law), anchors or everywhere(tokens)
        draft = laws(params.draft, teacher_forced(self.model, params.draft, tokens), law)

        def compare(target: Array, read: Array) -> tuple[Array, Array]:
            log_p, log_q = policy.log_probs(target), draft.log_probs(read)
            return divergence(self.objective, log_p, log_q), acceptance(log_p, log_q)

        sources = (tokens_at(x.source, chosen.place - 1) for x in (policy, draft))
        losses, overlaps = policy.by_position(compare, *sources)
        counts = tokens_at(mask, chosen.place).astype(jnp.float32)
        return DraftLoss(
            jnp.sum(losses * counts * chosen.weight), at_anchors(chosen, overlaps * counts, tokens.shape[1])
        )

"""Example of a custom drafter: a bigram table, distilled from the policy during RL.

The table is trained, saved, resumed and reported like a built-in draft. It does not change the distribution of
completions: specjax.testing.assert_lossless tests that for any drafter (docs/drafters.md).

    python -m launch.train tiny --draft.kind examples.bigram_drafter:build
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from launch.setup.drafts.base import Draft, DraftContext
from specjax import Drafter, DraftLoss, Proposal
from specjax.drafters.distillation import acceptance, divergence
from specjax.log_probs import laws
from specjax.sampling import full_log_probs, process_logits, sample


@dataclass(frozen=True)
class Bigram(Drafter):
    """Drafter that samples each token from a table, given the token before it.

    `params.draft["table"]`, [V, V], holds the logits of the next token. The state, int32 [B], is each row's last token.
    """

    def start(self, params, prompts, features, width, drafting=True) -> Array:
        return jnp.zeros_like(prompts.lengths)

    def observe(self, state, features: Array | None, tokens, emitted) -> Array:
        last = jnp.take_along_axis(tokens, jnp.maximum(emitted - 1, 0)[:, None], axis=1)[:, 0]
        return jnp.where(emitted > 0, last, state)

    def catch_up(self, state, visible, tokens, emitted) -> Array:
        return self.observe(state, None, tokens, emitted)

    def propose(self, params, state, gumbel, law) -> tuple[Proposal, Array]:
        last, tokens, log_q = state, [], []
        for i in range(gumbel.shape[1]):
            log_q.append(process_logits(params.draft["table"][last], law))
            last = sample(log_q[-1], gumbel[:, i])
            tokens.append(last)
        return Proposal(jnp.stack(tokens, 1), jnp.stack(log_q, 1), jnp.full_like(state, len(tokens))), state

    def loss(self, params, tokens, output, mask, law, anchors=None) -> DraftLoss:
        policy = laws(params.policy, output, law)
        log_p = policy.log_probs(policy.source[:, :-1])
        log_q = full_log_probs(params.draft["table"][tokens[:, :-1]], law)
        counts = mask[:, 1:].astype(jnp.float32)
        overlap = jax.lax.stop_gradient(acceptance(log_p, log_q) * counts)
        losses = divergence("cross_entropy", log_p, log_q) * counts
        return DraftLoss(jnp.sum(losses), jnp.pad(overlap, ((0, 0), (1, 0))))


def build(context: DraftContext) -> Draft:
    """Return the drafter and a table of zeros: before training, every token is equally likely."""
    return Draft(Bigram(), {"table": jnp.zeros((context.policy.vocab_size,) * 2)})

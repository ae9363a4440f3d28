"""Gradients of both losses from one teacher-forced forward, accumulated over microbatches.

The draft's loss reads the policy's output through stop_gradient and is differentiated apart, so that the policy's
gradient is the same program whether the draft is trained or not.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float

from specjax.drafters import Drafter
from specjax.drafters.base import Anchors, DraftLoss
from specjax.log_probs import teacher_forced, token_log_probs, without_logits
from specjax.sampling import SamplingLaw
from specjax.train.adaptation import maybe_cond
from specjax.train.anchors import draw_anchors
from specjax.train.batch import Sequences, TrainBatch, split
from specjax.train.ladder import in_window, put_back, sorted_order, take_rows
from specjax.train.loss import (
    LossConfig,
    LossFn,
    LossInputs,
    per_token_loss,
    policy_loss,
    token_weights,
)
from specjax.train.loss_sums import DraftSums, PolicySums, Sums, no_draft_sums, reduce_sums, sum_draft, sum_policy
from specjax.train.routing import routed, sum_routing
from specjax.types import Params, Policy, PolicyOutput, PyTree
from specjax.verify import Verifier, VerifierName


@dataclass(frozen=True)
class LossContext:
    """Functions and options that both losses share.

    Attributes:
        law:          the rollout's.
        loss:         options of `loss_fn`.
        loss_fn:      the policy's loss.
        verifier:     the rollout's, which tells how many drafted tokens should have been accepted.
        microbatches: parts in which a gradient is accumulated; any number gives the same.
        ladder:       windows that a microbatch may be cut to (specjax.train.ladder); any gives the same gradient.
        budget:       the most tokens that a completion may have; None for as many as a row.
        logit_chunk:  positions of each row whose logits exist at a time (specjax.log_probs); 0 for all.
        train_draft:  False: the draft's loss is measured alone, and its gradient is zero.
        anchors:      completion tokens of each row at which the draft learns; 0 for all.
    """

    policy: Policy
    drafter: Drafter
    law: SamplingLaw
    loss: LossConfig = LossConfig()
    loss_fn: LossFn = policy_loss
    verifier: VerifierName | Verifier = "rejection"
    microbatches: int = 1
    ladder: tuple[int, ...] = ()
    budget: int | None = None
    logit_chunk: int = 0
    train_draft: bool = True
    anchors: int = 0

    def forward(self, weights: PyTree, sequences: Sequences) -> PolicyOutput:
        """Run the policy over whole rows."""
        routes = sequences.routes if self.loss.routing == "replay" else None
        return teacher_forced(self.policy, weights, sequences.tokens, self.logit_chunk, routes)

    def anchors_of(self, sequences: Sequences) -> Anchors | None:
        """Draw the anchors of rows that have keys; None: the draft learns at every completion token."""
        if not self.anchors:
            return None
        if sequences.keys is None:
            raise ValueError(f"anchors = {self.anchors}: the sequences have no keys to draw them with")
        return draw_anchors(sequences.keys, sequences.completion, self.anchors)


def accumulate(
    context: LossContext,
    params: Params,
    batch: TrainBatch,
    draft_due: bool | Bool[Array, ""] = True,
    replay: Sequences | None = None,
) -> tuple[Params, Sums]:
    """Return the gradients of the policy's and the draft's loss, each normalised over the whole batch, and sums.

    draft_due: False: nothing of the draft is computed; its gradient and sums are zero. It may be traced.
    replay:    rows of earlier rollouts, [n, R, ..], over which the draft's gradient is taken too. The sums are those of
               `batch` alone.
    """
    weight = token_weights(batch.trained, context.loss.aggregate, context.budget or batch.tokens.shape[1])
    draft_tokens = jnp.maximum(jnp.sum(batch.completion, dtype=jnp.float32), 1.0)
    if replay is not None:
        draft_tokens += jnp.sum(replay.completion, dtype=jnp.float32)
    run = partial(microbatch_gradients, context, params, draft_tokens, draft_due)
    weights = [weight]
    if context.policy.mixture is not None:
        weights.append(token_weights(routed(batch), "sequence", batch.tokens.shape[1]))

    def add(total: Params, part: tuple[Any, ...]) -> tuple[Params, Sums]:
        gradients, sums = in_window(run, context.ladder, *part)
        return jax.tree.map(jnp.add, total, gradients), sums

    zeros = replace(jax.tree.map(jnp.zeros_like, params), memory=())
    gradients, parts = jax.lax.scan(add, zeros, split((batch, *weights), context.microbatches))
    if replay is not None and context.train_draft and jax.tree.leaves(params.draft):
        rows = jax.vmap(partial(split, parts=context.microbatches))(replay)
        rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)
        with jax.named_scope("replay"):
            draft = maybe_cond(
                draft_due,
                lambda total: add_draft_gradients(context, params, draft_tokens, total, rows)[0],
                lambda total: total,
                gradients.draft,
            )
        gradients = replace(gradients, draft=draft)
    return gradients, reduce_sums(parts)


def microbatch_gradients(
    context: LossContext,
    params: Params,
    draft_tokens: Float[Array, ""],
    draft_due: bool | Bool[Array, ""],
    batch: TrainBatch,
    *weights: Float[Array, "R S"],
) -> tuple[Params, Sums]:
    """Return the contribution of one microbatch to both gradients, and its sums.

    weights: those of `weighted_policy_loss`. draft_tokens: divisor of the draft's loss.
    """
    with jax.named_scope("policy_gradient"):
        differentiate = jax.grad(weighted_policy_loss, argnums=1, has_aux=True)
        policy, (output, policy_sums) = differentiate(context, params.policy, batch, *weights)
    if not jax.tree.leaves(params.draft):
        return Params(policy, params.draft), Sums(policy_sums, no_draft_sums())
    zeros = jax.tree.map(jnp.zeros_like, params.draft)
    if context.anchors and not context.drafter.reads_logits and not isinstance(draft_due, bool):
        # Else the conditional keeps the logits alive, also in steps that do not train the draft.
        output = without_logits(context.policy, output, context.logit_chunk)

    def study() -> tuple[PyTree, DraftSums]:
        anchors = context.anchors_of(batch)
        if context.train_draft:
            gradient, result = draft_gradient(context, params, draft_tokens, batch, output, anchors)
        else:
            gradient, result = zeros, draft_loss(context, params, params.draft, batch, output, anchors)
        return gradient, sum_draft(batch, result, anchors, context.verifier)

    with jax.named_scope("draft_gradient"):
        draft, draft_sums = maybe_cond(draft_due, study, lambda: (zeros, no_draft_sums()))
    return Params(policy, draft), Sums(policy_sums, draft_sums)


def weighted_policy_loss(
    context: LossContext,
    weights: PyTree,
    batch: TrainBatch,
    weight: Float[Array, "R S"],
    balance_weight: Float[Array, "R S"] | None = None,
) -> tuple[Float[Array, ""], tuple[PolicyOutput, PolicySums]]:
    """Return the policy's loss over a microbatch, its forward and its sums; only the loss is differentiable.

    weight: weight of each token in the loss. balance_weight: likewise in the routers' (`sum_routing`).
    """
    output = context.forward(weights, batch)
    theta, entropy = token_log_probs(weights, output, batch.tokens, context.law)
    inputs = loss_inputs(theta, batch)
    each = per_token_loss(context.loss_fn, inputs, context.loss)
    loss = jnp.sum(each.loss * weight[:, 1:])
    router = None
    if output.routing is not None and balance_weight is not None:
        router = sum_routing(output.routing, batch, balance_weight)
        if context.loss.router_aux_loss_coef:
            loss += context.loss.router_aux_loss_coef * router.balance
    current = None if batch.current is None else batch.current[:, 1:]
    sums = sum_policy(*jax.lax.stop_gradient((inputs, loss, entropy, each.metrics)), context.loss, current)
    sums = sums._replace(router=jax.lax.stop_gradient(router))
    return loss, (jax.lax.stop_gradient(output), sums)


def loss_inputs(theta: Float[Array, "R T"], batch: TrainBatch) -> LossInputs:
    """Return the inputs of the policy's loss. theta: log-probs of the tokens from the second on.

    Without `old`, the current policy anchors the ratio. Without `mu`, the anchor takes its place.
    """
    mask = batch.trained[:, 1:]

    def masked(x: Array) -> Array:
        return jnp.where(mask, x, 0.0)

    old = masked(jax.lax.stop_gradient(theta) if batch.old is None else batch.old[:, 1:])
    return LossInputs(
        theta=masked(theta),
        old=old,
        mu=old if batch.mu is None else masked(batch.mu[:, 1:]),
        reference=None if batch.reference is None else masked(batch.reference[:, 1:]),
        advantage=masked(batch.advantage[:, 1:]),
        mask=mask,
    )


def draft_loss(
    context: LossContext,
    params: Params,
    draft: PyTree,
    sequences: Sequences,
    output: PolicyOutput,
    anchors: Anchors | None,
) -> DraftLoss:
    """Return the loss of the parameters `draft`, and differentiate it in these alone.

    output:  of the policy, through stop_gradient.
    anchors: the completion tokens that count; None: all.
    """
    both = Params(jax.lax.stop_gradient(params.policy), draft, params.memory)
    return context.drafter.loss(both, sequences.tokens, output, sequences.completion, context.law, anchors)


def draft_gradient(
    context: LossContext,
    params: Params,
    tokens: Float[Array, ""],
    sequences: Sequences,
    output: PolicyOutput,
    anchors: Anchors | None,
) -> tuple[PyTree, DraftLoss]:
    """Return the gradient of the draft's loss divided by `tokens`, and the undivided loss."""

    def mean(draft: PyTree) -> tuple[Array, DraftLoss]:
        result = draft_loss(context, params, draft, sequences, output, anchors)
        return result.loss / tokens, result

    return jax.grad(mean, has_aux=True)(params.draft)


def add_draft_gradients(
    context: LossContext, params: Params, tokens: Float[Array, ""], total: PyTree, parts: Sequences
) -> tuple[PyTree, tuple[Float[Array, "parts"], Float[Array, "parts"]]]:
    """Add to `total` the draft's gradient over parts [n, R, ..], each by a forward of the policy of its own.

    Returns the sum of both, and the loss and the overlap of each part.
    """

    def run(part: Sequences) -> tuple[PyTree, tuple[Array, Array]]:
        with jax.named_scope("policy_forward"):
            output = jax.lax.stop_gradient(context.forward(params.policy, part))
        with jax.named_scope("draft_gradient"):
            gradient, result = draft_gradient(context, params, tokens, part, output, context.anchors_of(part))
        return gradient, (result.loss, jnp.sum(result.overlap))

    def add(total: PyTree, part: Sequences) -> tuple[PyTree, tuple[Array, Array]]:
        gradient, sums = in_window(run, context.ladder, part)
        return jax.tree.map(jnp.add, total, gradient), sums

    return jax.lax.scan(add, total, parts)


def log_probs_of(context: LossContext, weights: PyTree, sequences: Sequences, mesh: Mesh) -> Float[Array, "R S"]:
    """Return log-probs of the completion tokens under these weights, with temperature alone; 0 elsewhere."""
    width = sequences.tokens.shape[1]

    def run(part: Sequences) -> Array:
        output = context.forward(weights, part)
        log_probs, _ = token_log_probs(weights, output, part.tokens, context.law)
        kept = jnp.where(part.completion[:, 1:], log_probs, 0.0)
        return jnp.pad(kept, ((0, 0), (1, width - part.tokens.shape[1])))

    rows = Sequences(sequences.tokens, sequences.completion, routes=sequences.routes)
    order = sorted_order(rows, mesh, context.microbatches) if context.ladder else None
    if order is not None:
        rows = take_rows(rows, order, mesh)
    parts = jax.lax.map(lambda part: in_window(run, context.ladder, part), split(rows, context.microbatches))
    log_probs = jnp.moveaxis(parts, 0, 1).reshape(-1, width)
    return log_probs if order is None else put_back(log_probs, order, mesh)

"""The draft's loss: its gradient, and the sums over tokens that metrics, schedule and alarm read."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.adapters import joined
from specjax.drafters.base import Anchors, DraftLoss, at_anchors
from specjax.train.batch import Sequences, TrainBatch, split
from specjax.train.ladder import in_window
from specjax.train.loss_context import LossContext
from specjax.types import Params, PolicyOutput, PyTree
from specjax.verify import Verifier, VerifierName, find_verifier


class DraftSums(NamedTuple):
    """Sums over the completion tokens, estimated from anchors where these are drawn.

    Attributes:
        tokens:   Number of tokens.
        loss:     Distillation loss.
        overlap:  sum_v min(p, q), the expected acceptance at position 1.
        measured: Number of tokens at which it was computed.
        drafted:  Number of tokens that stood at position 1 of a draft; with anchors, of the anchors among them.
        expected: Lower bound on the expected number of these that are accepted.
        accepted: Number of these that were accepted.
    """

    tokens: Array
    loss: Array
    overlap: Array
    measured: Array
    drafted: Array
    expected: Array
    accepted: Array


def draft_loss(
    context: LossContext,
    params: Params,
    draft: PyTree,
    sequences: Sequences,
    output: PolicyOutput,
    anchors: Anchors,
) -> DraftLoss:
    """Return the loss of the parameters `draft`; it is differentiable only by these.

    output:  of the policy, through stop_gradient.
    anchors: the completion tokens that count.
    """
    both = replace(jax.lax.stop_gradient(joined(params)), draft=draft)
    return context.drafter.loss(both, sequences.tokens, output, sequences.completion, context.law, anchors)


def draft_gradient(
    context: LossContext,
    params: Params,
    tokens: Float[Array, ""],
    sequences: Sequences,
    output: PolicyOutput,
    anchors: Anchors,
) -> tuple[PyTree, DraftLoss]:
    """Return the gradient of the draft's loss divided by `tokens`, and the undivided loss."""

    def mean(draft: PyTree) -> tuple[Array, DraftLoss]:
        result = draft_loss(context, params, draft, sequences, output, anchors)
        return result.loss / tokens, result

    return jax.grad(mean, has_aux=True)(params.draft)


def gradient_and_sums(
    context: LossContext, params: Params, tokens: Float[Array, ""], batch: TrainBatch, output: PolicyOutput
) -> tuple[PyTree, DraftSums]:
    """Return the draft's gradient over a microbatch, zero unless it is trained, and its sums. tokens: the divisor."""
    anchors = context.anchors_of(batch)
    if context.train_draft:
        gradient, result = draft_gradient(context, params, tokens, batch, output, anchors)
    else:
        gradient = jax.tree.map(jnp.zeros_like, params.draft)
        result = draft_loss(context, params, params.draft, batch, output, anchors)
    return gradient, _sums(batch, result, anchors, context.verifier)


def add_replay_gradient(
    context: LossContext, params: Params, tokens: Float[Array, ""], replay: Sequences, total: PyTree
) -> PyTree:
    """Add to `total` the draft's gradient over rows [n, R, ..] of earlier rollouts. The policy runs over them again."""

    def run(part: Sequences) -> PyTree:
        with jax.named_scope("policy_forward"):
            output = jax.lax.stop_gradient(context.forward(joined(params).policy, part))
        with jax.named_scope("draft_gradient"):
            return draft_gradient(context, params, tokens, part, output, context.anchors_of(part))[0]

    def add(total: PyTree, part: Sequences) -> tuple[PyTree, None]:
        return jax.tree.map(jnp.add, total, in_window(run, context.ladder, part)), None

    parts = jax.vmap(partial(split, parts=context.microbatches, unit=context.samples))(replay)
    parts = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), parts)
    return jax.lax.scan(add, total, parts)[0]


def no_draft_sums() -> DraftSums:
    """Return the sums of a step that neither trains nor measures the draft."""
    return DraftSums(*[jnp.float32(0)] * len(DraftSums._fields))


def _sums(batch: TrainBatch, result: DraftLoss, anchors: Anchors, verifier: VerifierName | Verifier) -> DraftSums:
    weight = at_anchors(anchors, anchors.weight, batch.tokens.shape[1])
    drafted = expected = accepted = jnp.float32(0)
    if batch.proposed is not None and batch.accepted is not None:
        compared = batch.proposed & (weight > 0)
        drafted = jnp.sum(compared, dtype=jnp.float32)
        expected = jnp.sum(jnp.where(compared, find_verifier(verifier).promises(result.overlap), 0.0))
        accepted = jnp.sum(compared & batch.accepted, dtype=jnp.float32)
    tokens = jnp.sum(batch.completion, dtype=jnp.float32)
    overlap, measured = jnp.sum(weight * result.overlap), jnp.sum(weight > 0, dtype=jnp.float32)
    return DraftSums(tokens, result.loss, overlap, measured, drafted, expected, accepted)

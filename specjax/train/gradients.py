"""Gradients of both losses from one teacher-forced forward, accumulated over microbatches.

The draft's loss reads the policy's output through stop_gradient and is differentiated apart, so that the policy's
gradient is the same program whether the draft is trained or not.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from specjax.adapters import joined
from specjax.cache import tokens_at
from specjax.log_probs import token_log_probs
from specjax.train.batch import Sequences, TrainBatch, join, split
from specjax.train.draft.loss import add_replay_gradient, gradient_and_sums, no_draft_sums
from specjax.train.draft.schedule import maybe_cond
from specjax.train.ladder import in_window, put_back, sorted_order, take_rows
from specjax.train.loss import LossInputs, per_token_loss, token_weights
from specjax.train.loss_context import LossContext
from specjax.train.loss_sums import PolicySums, Sums, reduce_sums, sum_policy
from specjax.train.routing import routed, sum_routing
from specjax.train.teacher import sum_teacher, with_divergence, with_teacher_cost
from specjax.types import Params, PolicyOutput, PyTree


def accumulate(
    context: LossContext,
    params: Params,
    batch: TrainBatch,
    draft_due: bool | Bool[Array, ""] = True,
    replay: Sequences | None = None,
    teacher: PyTree = None,
) -> tuple[Params, Sums]:
    """Return the gradients of the policy's and the draft's loss, each normalised over the whole batch, and sums.

    draft_due: False: nothing of the draft is computed; its gradient and sums are zero. It may be traced.
    replay:    rows of earlier rollouts, [n, R, ..], over which the draft's gradient is taken too. The sums are those of
               `batch` alone.
    teacher:   the teacher's parameters; None if it has the policy's own.
    """
    weight = token_weights(batch.trained, context.loss.aggregate, context.budget or batch.tokens.shape[1])
    draft_tokens = jnp.maximum(jnp.sum(batch.completion, dtype=jnp.float32), 1.0)
    if replay is not None:
        draft_tokens += jnp.sum(replay.completion, dtype=jnp.float32)
    run = partial(microbatch_gradients, context, params, teacher, draft_tokens, draft_due)
    weights = [weight]
    if context.policy.mixture is not None:
        weights.append(token_weights(routed(batch), "sequence", batch.tokens.shape[1]))

    def add(total: Params, part: tuple[Any, ...]) -> tuple[Params, Sums]:
        gradients, sums = in_window(run, context.ladder, *part)
        return jax.tree.map(jnp.add, total, gradients), sums

    zeros = Params(*jax.tree.map(jnp.zeros_like, (params.policy, params.draft)))
    gradients, parts = jax.lax.scan(add, zeros, split((batch, *weights), context.microbatches, context.samples))
    if replay is not None and context.train_draft and jax.tree.leaves(params.draft):
        with jax.named_scope("replay"):
            add_replay = partial(add_replay_gradient, context, params, draft_tokens, replay)
            draft = maybe_cond(draft_due, add_replay, lambda total: total, gradients.draft)
        gradients = replace(gradients, draft=draft)
    return gradients, reduce_sums(parts)


def microbatch_gradients(
    context: LossContext,
    params: Params,
    teacher: PyTree,
    draft_tokens: Float[Array, ""],
    draft_due: bool | Bool[Array, ""],
    batch: TrainBatch,
    *weights: Float[Array, "R S"],
) -> tuple[Params, Sums]:
    """Return the contribution of one microbatch to both gradients, and its sums.

    weights: those of `weighted_policy_loss`. teacher: as in `accumulate`. draft_tokens: divisor of the draft's loss.
    """
    with jax.named_scope("policy_gradient"):
        differentiate = jax.grad(weighted_policy_loss, argnums=1, has_aux=True)
        policy, (output, policy_sums) = differentiate(context, params.policy, params.base, teacher, batch, *weights)
    if not jax.tree.leaves(params.draft):
        return Params(policy, params.draft), Sums(policy_sums, no_draft_sums())
    with jax.named_scope("draft_gradient"):
        draft, draft_sums = maybe_cond(
            draft_due,
            lambda: gradient_and_sums(context, params, draft_tokens, batch, output),
            lambda: (jax.tree.map(jnp.zeros_like, params.draft), no_draft_sums()),
        )
    return Params(policy, draft), Sums(policy_sums, draft_sums)


def weighted_policy_loss(
    context: LossContext,
    trained: PyTree,
    base: PyTree,
    teacher: PyTree,
    batch: TrainBatch,
    weight: Float[Array, "R S"],
    balance_weight: Float[Array, "R S"] | None = None,
) -> tuple[Float[Array, ""], tuple[PolicyOutput, PolicySums]]:
    """Return the policy's loss over a microbatch, its forward and its sums; only the loss is differentiable.

    trained, base: `policy` and `base` of the parameters. teacher: as in `accumulate`. weight: weight of each token in
    the loss. balance_weight: likewise in the routers' (`sum_routing`).
    """
    weights = joined(Params(trained, {}, base=base)).policy
    output = context.forward(weights, batch)
    place = batch.places(context.budget)
    compared = None if context.teacher is None else context.compare(weights, output, teacher, batch, place)
    if compared is not None and context.distillation.learns_from_teacher:
        theta, entropy = compared.theta, compared.entropy
    else:
        theta, entropy = token_log_probs(weights, output, batch.tokens, context.law, place)
    inputs = with_teacher_cost(loss_inputs(theta, batch, place), compared, context.distillation)
    each = per_token_loss(context.loss_fn, inputs, context.loss)
    by_token = with_divergence(each.loss, inputs.mask, compared, context.distillation)
    loss = jnp.sum(by_token * tokens_at(weight, place))
    router = None
    if output.routing is not None and balance_weight is not None:
        router = sum_routing(output.routing, batch, balance_weight)
        if context.loss.router_aux_loss_coef:
            loss += context.loss.router_aux_loss_coef * router.balance
    current = None if batch.current is None else tokens_at(batch.current, place)
    sums = sum_policy(*jax.lax.stop_gradient((inputs, loss, entropy, each.metrics)), context.loss, current)
    sums = sums._replace(router=jax.lax.stop_gradient(router))
    if compared is not None:
        stops = jnp.isin(tokens_at(batch.tokens, place), jnp.array(context.stop_tokens, jnp.int32))
        sums = sums._replace(teacher=sum_teacher(jax.lax.stop_gradient(compared), inputs.mask, stops))
    return loss, (jax.lax.stop_gradient(output), sums)


def loss_inputs(theta: Float[Array, "R N"], batch: TrainBatch, place: Int[Array, "R N"]) -> LossInputs:
    """Return the inputs of the policy's loss. theta: log-probs of the tokens at `place`, which are all that are read.

    Without `old`, the current policy anchors the ratio. Without `mu`, the anchor takes its place.
    """
    mask = tokens_at(batch.trained, place)

    def read(x: Array) -> Array:
        return jnp.where(mask, tokens_at(x, place), 0.0)

    old = jnp.where(mask, jax.lax.stop_gradient(theta), 0.0) if batch.old is None else read(batch.old)
    return LossInputs(
        theta=jnp.where(mask, theta, 0.0),
        old=old,
        mu=old if batch.mu is None else read(batch.mu),
        reference=None if batch.reference is None else read(batch.reference),
        advantage=read(batch.advantage),
        mask=mask,
    )


def log_probs_of(context: LossContext, weights: PyTree, sequences: Sequences, mesh: Mesh) -> Float[Array, "R S"]:
    """Return log-probs of the completion tokens under these weights, with temperature alone; 0 elsewhere."""
    width = sequences.tokens.shape[1]

    def run(part: Sequences) -> Array:
        output = context.forward(weights, part)
        log_probs, _ = token_log_probs(weights, output, part.tokens, context.law, part.places(context.budget))
        number = jnp.cumsum(part.completion, axis=1, dtype=jnp.int32) - 1
        log_probs = jnp.where(part.completion, tokens_at(log_probs, number), 0.0)
        return jnp.pad(log_probs, ((0, 0), (0, width - part.tokens.shape[1])))

    rows = Sequences(sequences.tokens, sequences.completion, routes=sequences.routes)
    order = sorted_order(rows, mesh, context.microbatches) if context.ladder else None
    if order is not None:
        rows = take_rows(rows, order, mesh)
    parts = split(rows, context.microbatches, context.samples)
    log_probs = join(jax.lax.map(lambda part: in_window(run, context.ladder, part), parts), context.samples)
    return log_probs if order is None else put_back(log_probs, order, mesh)

"""Distillation of a draft from a policy that stands still: the train step's draft loss without the rest of the step."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from specjax.drafters import Drafter
from specjax.log_probs import teacher_forced
from specjax.parallel.mesh import BATCH_AXES, batch_shards, finished
from specjax.sampling import SamplingLaw
from specjax.train.batch import Batch, split
from specjax.train.ladder import in_window, sort_rows
from specjax.train.metrics import Metrics
from specjax.train.optimizer import init_moments, update, usable
from specjax.types import Params, Policy, PyTree, pytree


@pytree
class DistillState:
    """What a step updates: the draft's parameters and its optimiser's state. Donated to each step."""

    draft: PyTree
    moments: PyTree


DistillStep = Callable[[DistillState, PyTree, Batch], tuple[DistillState, Metrics]]


def init_distill_state(draft: PyTree, optimizer: optax.GradientTransformation, mesh: Mesh) -> DistillState:
    """A fresh state around a copy of `draft`, which lies on the mesh; moments are laid out as their parameters."""
    return DistillState(jax.tree.map(jnp.copy, draft), init_moments(optimizer, draft, mesh))


def make_distill_step(
    policy: Policy,
    drafter: Drafter,
    law: SamplingLaw,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    microbatches: int = 1,
    ladder: tuple[int, ...] = (),
    logit_chunk: int = 0,
) -> DistillStep:
    """`state, metrics = step(state, weights, batch)`: one compiled program, traced once, laid out as its first state.

    weights: the policy's parameters, which are only read. Of the batch every completion token counts, scored or not;
    the gradient is that of the draft in `specjax.train.gradients.accumulate`. microbatches, ladder, logit_chunk: as
    `TrainConfig` says. Raises ValueError where the rows do not divide over the mesh and the microbatches.
    """

    def step(state: DistillState, weights: PyTree, batch: Batch) -> tuple[DistillState, Metrics]:
        _check_rows(batch, mesh, microbatches)
        tokens = jnp.maximum(jnp.sum(batch.completion, dtype=jnp.float32), 1.0)
        if ladder:
            batch = sort_rows(batch, mesh, microbatches)

        def one(window: int, batch: Batch) -> tuple[PyTree, tuple[Array, Array]]:
            def mean(draft: PyTree) -> tuple[Array, Array]:
                both = Params(weights, draft)
                loss, overlap = draft_loss(policy, drafter, both, batch.cut(window), law, logit_chunk)
                return loss / tokens, overlap / tokens

            (loss, overlap), gradient = jax.value_and_grad(mean, has_aux=True)(state.draft)
            return gradient, (loss, overlap)

        def add(total: PyTree, part: Batch) -> tuple[PyTree, tuple[Array, Array]]:
            gradient, means = in_window(one, ladder, part)
            return jax.tree.map(jnp.add, total, gradient), means

        zero = jax.tree.map(jnp.zeros_like, state.draft)
        gradient, (loss, overlap) = jax.lax.scan(add, zero, split(batch, microbatches))
        draft, moments = update(optimizer, gradient, state.moments, state.draft, usable(gradient, jnp.sum(loss)))
        metrics = {
            "loss/draft": jnp.sum(loss),
            "draft/predicted_acceptance": jnp.sum(overlap),
            "grad_norm/draft": optax.tree.norm(gradient),
        }
        return DistillState(draft, moments), metrics

    rows = NamedSharding(mesh, P(BATCH_AXES))
    jitted: list[jax.stages.Wrapped] = []

    def call(state: DistillState, weights: PyTree, batch: Batch) -> tuple[DistillState, Metrics]:
        with jax.set_mesh(mesh):
            if not jitted:
                layout, fixed = (jax.tree.map(lambda x: x.sharding, tree) for tree in (state, weights))
                program = jax.jit(
                    step, in_shardings=(layout, fixed, rows), out_shardings=(layout, None), donate_argnums=0
                )
                jitted.append(program)
            return finished(jitted[0](state, weights, jax.device_put(batch, rows)), mesh)

    return call


def make_predict(
    policy: Policy,
    drafter: Drafter,
    law: SamplingLaw,
    mesh: Mesh,
    *,
    microbatches: int = 1,
    logit_chunk: int = 0,
) -> Callable[[Params, Batch], tuple[Array, Array]]:
    """(params, batch) -> (overlap, tokens), each summed over the completion tokens; compiled once.

    Their ratio is the acceptance to expect at position 1 under `law`, the mean of sum_v min(p, q).
    """

    @jax.jit
    def run(params: Params, batch: Batch) -> tuple[Array, Array]:
        _check_rows(batch, mesh, microbatches)
        parts = split(batch, microbatches)
        _, overlap = jax.lax.map(lambda part: draft_loss(policy, drafter, params, part, law, logit_chunk), parts)
        return jnp.sum(overlap), jnp.sum(batch.completion, dtype=jnp.float32)

    def call(params: Params, batch: Batch) -> tuple[Array, Array]:
        with jax.set_mesh(mesh):
            return finished(run(params, jax.device_put(batch, NamedSharding(mesh, P(BATCH_AXES)))), mesh)

    return call


def draft_loss(
    policy: Policy, drafter: Drafter, params: Params, batch: Batch, law: SamplingLaw, logit_chunk: int = 0
) -> tuple[Array, Array]:
    """The draft's (loss, overlap), summed over the batch, from a forward of the policy behind stop_gradient."""
    weights = jax.lax.stop_gradient(params.policy)
    with jax.named_scope("policy_forward"):
        output = teacher_forced(policy, weights, batch.tokens, logit_chunk)
    with jax.named_scope("draft_loss"):
        both = Params(weights, params.draft, params.memory)
        sums = drafter.loss(both, batch.tokens, jax.lax.stop_gradient(output), batch.completion, law)
    return sums.loss, jnp.sum(sums.overlap)


def _check_rows(batch: Batch, mesh: Mesh, microbatches: int) -> None:
    parts = batch_shards(mesh) * microbatches
    if len(batch.tokens) % parts:
        raise ValueError(f"batch = {len(batch.tokens)} rows: must be a multiple of shards x microbatches = {parts}")

"""Distillation of a draft from a fixed policy, with the draft loss of the training step."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from specjax import kernels
from specjax.drafters import Drafter
from specjax.parallel.mesh import BATCH_AXES, batch_shards
from specjax.sampling import SamplingLaw
from specjax.train.batch import Sequences, split
from specjax.train.gradients import LossContext, add_draft_gradients, draft_loss
from specjax.train.ladder import sort_rows
from specjax.train.metrics import Metrics
from specjax.train.optimizer import init_moments, update, usable
from specjax.types import Params, Policy, PyTree, pytree


@pytree
class DistillState:
    """State of distillation: the draft's parameters and its optimiser's state. Donated to each step."""

    draft: PyTree
    moments: PyTree


DistillStep = Callable[[DistillState, PyTree, Sequences], tuple[DistillState, Metrics]]


def init_distill_state(draft: PyTree, optimizer: optax.GradientTransformation, mesh: Mesh) -> DistillState:
    """Return a fresh state around a copy of `draft`, which must be on the mesh. Moments are sharded as parameters."""
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
    """Return `step(state, weights, sequences) -> state, metrics`, one program traced once.

    States keep the sharding of the first one. weights: the policy's parameters, which are only read. Every completion
    token counts. microbatches, ladder, logit_chunk: as in `TrainConfig`. A call raises ValueError if the rows do not
    divide over the mesh and the microbatches.
    """
    context = LossContext(policy, drafter, law, microbatches=microbatches, ladder=ladder, logit_chunk=logit_chunk)

    def step(state: DistillState, weights: PyTree, sequences: Sequences) -> tuple[DistillState, Metrics]:
        _check_rows(sequences, mesh, microbatches)
        tokens = jnp.maximum(jnp.sum(sequences.completion, dtype=jnp.float32), 1.0)
        rows = sort_rows(sequences, mesh, microbatches) if ladder else sequences
        zeros = jax.tree.map(jnp.zeros_like, state.draft)
        gradient, (loss, overlap) = add_draft_gradients(
            context, Params(weights, state.draft), tokens, zeros, split(rows, microbatches)
        )
        mean = jnp.sum(loss) / tokens
        draft, moments = update(optimizer, gradient, state.moments, state.draft, usable(gradient, mean))
        metrics = {
            "loss/draft": mean,
            "draft/predicted_acceptance": jnp.sum(overlap) / tokens,
            "grad_norm/draft": optax.tree.norm(gradient),
        }
        return DistillState(draft, moments), metrics

    rows = NamedSharding(mesh, P(BATCH_AXES))
    jitted: list[jax.stages.Wrapped] = []

    def call(state: DistillState, weights: PyTree, sequences: Sequences) -> tuple[DistillState, Metrics]:
        with jax.set_mesh(mesh):
            if not jitted:
                layout, fixed = (jax.tree.map(lambda x: x.sharding, tree) for tree in (state, weights))
                program = jax.jit(
                    step, in_shardings=(layout, fixed, rows), out_shardings=(layout, None), donate_argnums=0
                )
                jitted.append(program)
            return kernels.finished(jitted[0](state, weights, jax.device_put(sequences, rows)), mesh)

    return call


def make_predict(
    policy: Policy,
    drafter: Drafter,
    law: SamplingLaw,
    mesh: Mesh,
    *,
    microbatches: int = 1,
    logit_chunk: int = 0,
) -> Callable[[Params, Sequences], tuple[Array, Array]]:
    """Return (params, sequences) -> (overlap, tokens), each summed over the completion tokens; compiled once.

    Their ratio is the expected acceptance at position 1 under `law`, the mean of sum_v min(p, q).
    """
    context = LossContext(policy, drafter, law, logit_chunk=logit_chunk)

    @jax.jit
    def run(params: Params, sequences: Sequences) -> tuple[Array, Array]:
        def overlap(part: Sequences) -> Array:
            output = context.forward(params.policy, part)
            return jnp.sum(draft_loss(context, params, params.draft, part, output).overlap)

        _check_rows(sequences, mesh, microbatches)
        return jnp.sum(jax.lax.map(overlap, split(sequences, microbatches))), jnp.sum(
            sequences.completion, dtype=jnp.float32
        )

    def call(params: Params, sequences: Sequences) -> tuple[Array, Array]:
        with jax.set_mesh(mesh):
            return kernels.finished(run(params, jax.device_put(sequences, NamedSharding(mesh, P(BATCH_AXES)))), mesh)

    return call


def _check_rows(sequences: Sequences, mesh: Mesh, microbatches: int) -> None:
    parts = batch_shards(mesh) * microbatches
    if len(sequences.tokens) % parts:
        raise ValueError(f"batch = {len(sequences.tokens)} rows: must be a multiple of shards x microbatches = {parts}")

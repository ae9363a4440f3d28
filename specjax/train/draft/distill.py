"""Distillation of a draft from a fixed policy, its teacher, with the draft loss of the training step.

The policy does not change, so its forward over an answer is computed once, and its outputs are kept for all steps that
train on the answer.
"""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from specjax.adapters import joined
from specjax.drafters import Drafter
from specjax.drafters.base import Anchors, at_anchors
from specjax.log_probs import teacher_forced, without_logits
from specjax.parallel import processes
from specjax.parallel.mesh import BATCH_AXES, batch_shards, shapes_on
from specjax.program import Program
from specjax.sampling import SamplingLaw
from specjax.train.batch import Sequences, split
from specjax.train.draft.anchors import spaced_anchors
from specjax.train.draft.loss import draft_gradient, draft_loss
from specjax.train.loss_context import LossContext
from specjax.train.metrics import Metrics
from specjax.train.optimizer import init_moments, update, usable
from specjax.types import Params, Policy, PolicyOutput, PyTree, pytree

T = TypeVar("T")


@pytree
class DistillState:
    """State of distillation: the draft's parameters and its optimiser's state. Donated to each step."""

    draft: PyTree
    moments: PyTree


@pytree
class TeacherOutputs:
    """Outputs of the policy that a draft's loss reads: all but the logits, which the hidden state gives."""

    features: Float[Array, "R S F"]
    hidden: Float[Array, "R S D"]


class DistillBatch(NamedTuple):
    """Rows to distil from. anchors: the completion tokens that count, as a rule `spaced_anchors`."""

    sequences: Sequences
    teacher: TeacherOutputs
    anchors: Anchors


class OverRows(Generic[T]):
    """Function (params, sequences) -> result, compiled, with the rows split over the mesh."""

    def __init__(self, run: Callable[[PyTree, Sequences], T], mesh: Mesh) -> None:
        self._program, self._rows = Program(run, mesh), NamedSharding(mesh, P(BATCH_AXES))

    def __call__(self, params: PyTree, sequences: Sequences) -> T:
        return self._program(params, processes.place(sequences, self._rows))

    def start_compiling(self, params: PyTree, sequences: Sequences) -> None:
        """Start to compile for sequences of such shapes (`Program.start_compiling`)."""
        self._program.start_compiling(params, shapes_on(self._rows, sequences))


class DistillStep:
    """Compiled step of distillation: see `make_distill_step`."""

    def __init__(self, step: Callable[..., tuple[DistillState, Metrics]], mesh: Mesh) -> None:
        self._step, self._mesh, self._rows = step, mesh, NamedSharding(mesh, P(BATCH_AXES))
        self._made: Program[tuple[DistillState, Metrics]] | None = None

    def __call__(self, state: DistillState, weights: PyTree, batch: DistillBatch) -> tuple[DistillState, Metrics]:
        return self._program(state, weights)(state, weights, processes.place(batch, self._rows))

    def start_compiling(self, state: DistillState, weights: PyTree, batch: DistillBatch) -> None:
        """Start to compile for a batch of such shapes (`Program.start_compiling`)."""
        self._program(state, weights).start_compiling(state, weights, shapes_on(self._rows, batch))

    def _program(self, state: DistillState, weights: PyTree) -> Program[tuple[DistillState, Metrics]]:
        if self._made is None:
            layout, fixed = (jax.tree.map(lambda x: x.sharding, tree) for tree in (state, weights))
            shardings = {"in_shardings": (layout, fixed, self._rows), "out_shardings": (layout, None)}
            self._made = Program(self._step, self._mesh, **shardings, donate_argnums=0)
        return self._made


def init_distill_state(draft: PyTree, optimizer: optax.GradientTransformation, mesh: Mesh) -> DistillState:
    """Return a fresh state around a copy of `draft`, which must be on the mesh. Moments are sharded as parameters."""
    return DistillState(jax.tree.map(jnp.copy, draft), init_moments(optimizer, draft, mesh))


def make_teacher(policy: Policy, mesh: Mesh, microbatches: int = 1) -> OverRows[TeacherOutputs]:
    """Return (weights, sequences) -> outputs of the policy, one program for each width of the rows."""

    def run(weights: PyTree, sequences: Sequences) -> TeacherOutputs:
        def forward(part: Sequences) -> TeacherOutputs:
            output = teacher_forced(policy, weights, part.tokens)
            return TeacherOutputs(output.features, output.hidden)

        _check_rows(sequences, mesh, microbatches)
        parts = jax.lax.map(forward, split(sequences, microbatches))
        return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(sequences.tokens.shape[0], *x.shape[2:]), parts)

    return OverRows(run, mesh)


def make_distill_step(
    policy: Policy,
    drafter: Drafter,
    law: SamplingLaw,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    microbatches: int = 1,
    logit_chunk: int | None = None,
) -> DistillStep:
    """Return `step(state, weights, batch) -> state, metrics`, one program for each shape of the batch.

    States keep the sharding of the first one. weights: the policy's parameters, which are only read. microbatches,
    logit_chunk: as in `TrainConfig`. A call raises ValueError if the rows do not divide over the mesh and the
    microbatches.
    """
    context = LossContext(policy, drafter, law, microbatches=microbatches, logit_chunk=logit_chunk)

    def step(state: DistillState, weights: PyTree, batch: DistillBatch) -> tuple[DistillState, Metrics]:
        _check_rows(batch.sequences, mesh, microbatches)
        tokens = jnp.maximum(jnp.sum(batch.sequences.completion, dtype=jnp.float32), 1.0)
        params = Params(weights, state.draft)

        def add(total: PyTree, part: DistillBatch) -> tuple[PyTree, tuple[Array, Array]]:
            output = _policy_output(policy, part.teacher, logit_chunk)
            gradient, result = draft_gradient(context, params, tokens, part.sequences, output, part.anchors)
            return jax.tree.map(jnp.add, total, gradient), (result.loss, _weighted(result.overlap, part.anchors))

        zeros = jax.tree.map(jnp.zeros_like, state.draft)
        gradient, (loss, overlap) = jax.lax.scan(add, zeros, split(batch, microbatches))
        mean = jnp.sum(loss) / tokens
        draft, moments = update(optimizer, gradient, state.moments, state.draft, usable(gradient, mean))
        metrics = {
            "loss/draft": mean,
            "draft/predicted_acceptance": jnp.sum(overlap) / tokens,
            "grad_norm/draft": optax.tree.norm(gradient),
        }
        return DistillState(draft, moments), metrics

    return DistillStep(step, mesh)


def _policy_output(policy: Policy, teacher: TeacherOutputs, logit_chunk: int | None) -> PolicyOutput:
    """Return the policy's output of which these parts were kept."""
    no_logits = jnp.zeros((len(teacher.hidden), 0, policy.vocab_size), teacher.hidden.dtype)
    output = PolicyOutput(no_logits, teacher.features, teacher.hidden, None)
    return without_logits(policy, output, logit_chunk)


def make_predict(
    policy: Policy,
    drafter: Drafter,
    law: SamplingLaw,
    mesh: Mesh,
    *,
    microbatches: int = 1,
    logit_chunk: int | None = None,
) -> OverRows[tuple[Array, Array]]:
    """Return (params, sequences) -> (overlap, tokens), each summed over the completion tokens; compiled once.

    With a stride, the overlap is measured at one in so many tokens, which stand for the others. The sums' ratio is the
    expected acceptance at position 1 under `law`, the mean of sum_v min(p, q).
    """
    context = LossContext(policy, drafter, law, logit_chunk=logit_chunk)

    def run(params: Params, sequences: Sequences) -> tuple[Array, Array]:
        def overlap(part: Sequences) -> Array:
            output = context.forward(joined(params).policy, part)
            rows, length = part.tokens.shape
            anchors = spaced_anchors(part.completion, length, drafter.stride, jnp.arange(rows, dtype=jnp.int32))
            return _weighted(draft_loss(context, params, params.draft, part, output, anchors).overlap, anchors)

        _check_rows(sequences, mesh, microbatches)
        overlaps = jax.lax.map(overlap, split(sequences, microbatches))
        return jnp.sum(overlaps), jnp.sum(sequences.completion, dtype=jnp.float32)

    return OverRows(run, mesh)


def _weighted(overlap: Float[Array, "R S"], anchors: Anchors) -> Float[Array, ""]:
    """Return the sum over the anchors, each weighted by the tokens it stands for."""
    return jnp.sum(overlap * at_anchors(anchors, anchors.weight, overlap.shape[1]))


def _check_rows(sequences: Sequences, mesh: Mesh, microbatches: int) -> None:
    parts = batch_shards(mesh) * microbatches
    if len(sequences.tokens) % parts:
        raise ValueError(f"batch = {len(sequences.tokens)} rows: must be a multiple of shards x microbatches = {parts}")

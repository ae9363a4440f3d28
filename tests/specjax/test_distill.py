from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from models.decoder import make_policy
from specjax.sampling import SamplingLaw
from specjax.train.batch import Sequences, TrainBatch, split
from specjax.train.draft.anchors import spaced_anchors
from specjax.train.draft.distill import (
    DistillBatch,
    DistillStep,
    init_distill_state,
    make_distill_step,
    make_predict,
    make_teacher,
)
from specjax.train.gradients import accumulate
from specjax.train.loss_context import LossContext
from specjax.types import Params
from tests.refusals import refuses
from tests.specjax.training import (
    DECODER,
    assert_same_bits,
    mesh_of,
    networks,
    params_on,
    ragged_batch,
    relative_gap,
    traced_once,
)

ROWS, LENGTH = 8, 14
LAW = SamplingLaw(temperature=0.7)
POLICY, DRAFTER = networks(unroll=2)
MESH = mesh_of(1, 1, 1)
# With plain gradient descent at rate 1, the update is the gradient.
DESCENT = optax.sgd(1.0)


@pytest.fixture(scope="module")
def batch() -> Sequences:
    given = ragged_batch(ROWS, LENGTH)
    return Sequences(given.tokens, given.completion)


def rows_of(sequences: Sequences, params: Params, mesh: Mesh = MESH) -> DistillBatch:
    """Return the batch of all completion tokens of these sequences."""
    completion = np.asarray(sequences.completion)
    anchors = spaced_anchors(completion, int(completion.sum(axis=1).max()), DRAFTER.stride, np.arange(len(completion)))
    return DistillBatch(sequences, make_teacher(POLICY, mesh)(params.policy, sequences), anchors)


def gradient_of(step: DistillStep, params: Params, mesh: Mesh, batch: Sequences) -> tuple[Params, dict]:
    """Return the draft's gradient as `Params`, and the metrics."""
    before = jax.tree.map(np.array, params.draft)
    rows = rows_of(batch, params, mesh)
    state, metrics = step(init_distill_state(params.draft, DESCENT, mesh), params.policy, rows)
    return Params({}, jax.tree.map(lambda old, new: old - np.asarray(new), before, state.draft)), metrics


def test_distillation_works_for_drafts_without_features(params: Params, batch: Sequences) -> None:
    """Small models and MTP heads are such drafts."""
    policy = make_policy(replace(DECODER, feature_layers=()))
    teacher = make_teacher(policy, MESH, microbatches=2)(params.policy, batch)
    assert teacher.features.shape == (ROWS, LENGTH, 0)
    assert split(teacher, 2).features.shape == (2, ROWS // 2, LENGTH, 0)
    np.testing.assert_allclose(teacher.hidden, rows_of(batch, params).teacher.hidden, atol=1e-5)


@pytest.fixture(scope="module")
def params() -> Params:
    return params_on(MESH)


@pytest.fixture(scope="module")
def step() -> DistillStep:
    """Return a distillation step that fails if it is traced twice."""
    head = replace(DRAFTER.head, fuse=traced_once(DRAFTER.head.fuse))
    return make_distill_step(POLICY, replace(DRAFTER, head=head), LAW, DESCENT, MESH)


@pytest.fixture(scope="module")
def expected(params: Params, batch: Sequences) -> tuple[Params, dict[str, float]]:
    """Return the draft's gradient in a training step, and that step's draft metrics."""

    zeros, context = jnp.zeros(batch.tokens.shape), LossContext(POLICY, DRAFTER, LAW)
    trained = TrainBatch(**vars(batch), reward=zeros[:, 0], counted=zeros[:, 0] == 0, advantage=zeros)
    gradients, sums = jax.jit(partial(accumulate, context))(params, trained)
    predicted = float(sums.draft.overlap / sums.draft.tokens)
    return gradients, {
        "draft/predicted_acceptance": predicted,
        "grad_norm/draft": float(optax.tree.norm(gradients.draft)),
    }


def test_the_gradient_is_that_of_the_training_step(step, params, batch, expected) -> None:
    policy = jax.tree.map(np.array, params.policy)
    gradient, metrics = gradient_of(step, params, MESH, batch)
    assert relative_gap(gradient.draft, expected[0].draft) < 1e-5
    for name, value in expected[1].items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5)
    # The policy is not donated, so it can be used again.
    assert_same_bits(params.policy, policy)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((1, 1, 1), {"microbatches": 4, "logit_chunk": 5}),
        ((2, 1, 2), {"microbatches": 2}),
    ],
)
def test_microbatches_chunks_and_mesh_give_the_same_gradient(shape, options, batch, expected) -> None:
    mesh = mesh_of(*shape)
    step = make_distill_step(POLICY, DRAFTER, LAW, DESCENT, mesh, **options)
    gradient, metrics = gradient_of(step, params_on(mesh), mesh, batch)
    assert relative_gap(gradient.draft, expected[0].draft) < 1e-5
    np.testing.assert_allclose(metrics["grad_norm/draft"], expected[1]["grad_norm/draft"], rtol=1e-5)


def test_steps_train_the_draft_with_one_trace(step, params, batch) -> None:
    state, seen = init_distill_state(params.draft, DESCENT, MESH), []
    before, rows = jax.tree.map(np.array, params.draft), rows_of(batch, params)
    for _ in range(8):
        state, metrics = step(state, params.policy, rows)
        seen.append(float(metrics["loss/draft"]))
    assert seen[-1] < 0.97 * seen[0]
    # The initial draft was not donated, so it can be compared.
    assert_same_bits(params.draft, before)


def test_the_prediction_is_the_mean_overlap_of_both_laws(params, batch, expected) -> None:
    predict = make_predict(POLICY, DRAFTER, LAW, MESH, microbatches=2)
    overlap, tokens = predict(params, batch)
    assert int(tokens) == int(batch.completion.sum())
    np.testing.assert_allclose(overlap / tokens, expected[1]["draft/predicted_acceptance"], rtol=1e-5)
    empty = replace(batch, completion=jnp.zeros_like(batch.completion))
    assert [float(x) for x in predict(params, empty)] == [0, 0]


def test_rows_that_do_not_divide_are_refused(params, batch) -> None:
    step = make_distill_step(POLICY, DRAFTER, LAW, DESCENT, MESH, microbatches=3)
    with refuses("batch = 8 rows:...3"):
        step(init_distill_state(params.draft, DESCENT, MESH), params.policy, rows_of(batch, params))

"""Learning from a teacher in the update: gradients, masks, meshes, and what must not change."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.train.batch import TrainBatch
from specjax.train.gradients import accumulate
from specjax.train.loss import LossConfig
from specjax.train.loss_context import LossContext
from specjax.train.loss_sums import Sums
from specjax.train.stages import Stages
from specjax.train.teacher import TeacherConfig
from specjax.types import Params, PyTree
from tests.refusals import refuses
from tests.specjax import training
from tests.specjax.test_divergences import by_sums, softmax
from tests.specjax.training import assert_same_bits, mesh_of, networks, params_on, relative_gap

ROWS, LENGTH, FAILED = 8, 14, 5
POLICY, DRAFTER = networks()
MESH = mesh_of(1, 1, 1)
EXACT = TeacherConfig("network", weight=0.7)
# Of the policy's loss, ratios of 1 to itself: the gradient by rewards is that of advantage times log-prob.
CONTEXT = LossContext(
    POLICY,
    DRAFTER,
    training.CONFIG.rollout.law,
    LossConfig(importance_cap=None),
    train_draft=False,
    teacher=POLICY,
    distillation=EXACT,
    stop_tokens=(training.STOP,),
)

Accumulate = Callable[[Params, TrainBatch, PyTree], tuple[Params, Sums]]


def compiled(context: LossContext = CONTEXT) -> Accumulate:
    return jax.jit(lambda params, batch, teacher: accumulate(context, params, batch, False, teacher=teacher))


@pytest.fixture(scope="module")
def exact() -> Accumulate:
    return compiled()


@pytest.fixture(scope="module")
def params() -> Params:
    return params_on(MESH)


@pytest.fixture(scope="module")
def teacher(params) -> PyTree:
    rng = np.random.default_rng(3)
    return jax.tree.map(lambda x: x + 0.1 * jnp.asarray(rng.standard_normal(x.shape), x.dtype), params.policy)


@pytest.fixture(scope="module")
def batch() -> TrainBatch:
    batch = training.ragged_batch(ROWS, LENGTH, failed=FAILED)
    return replace(batch, mu=None, advantage=jnp.zeros_like(batch.advantage))


@pytest.fixture(scope="module")
def logits(params, teacher, batch) -> tuple[np.ndarray, np.ndarray]:
    """Return float64 logits of the policy and of the teacher, [R, S, V]."""
    forward = jax.jit(lambda weights: POLICY.apply(weights, batch.tokens, jnp.zeros(ROWS, jnp.int32)).logits)
    return np.asarray(forward(params.policy), np.float64), np.asarray(forward(teacher), np.float64)


def test_the_gradient_is_that_of_the_divergence_at_trained_tokens(exact, params, teacher, batch, logits) -> None:
    """Test against the logits' gradient s (d - K) of the field, sent back through a forward of one's own."""
    gradients, sums = exact(params, batch, teacher)
    own, others = logits
    trained: np.ndarray = np.asarray(batch.trained)
    tokens = int(trained.sum())
    s, t = softmax(own), softmax(others)
    ratio = np.log(s / t)
    kl = (s * ratio).sum(axis=-1, keepdims=True)
    # A law predicts the token after it.
    weight = np.pad(trained[:, 1:], ((0, 0), (0, 1)))[..., None] / tokens
    slope = jnp.asarray(EXACT.weight * weight * s * (ratio - kl), jnp.float32)

    @jax.jit
    def expected(weights: PyTree) -> PyTree:
        forward = partial(POLICY.apply, tokens=batch.tokens, start=jnp.zeros(ROWS, jnp.int32))
        return jax.grad(lambda weights: jnp.sum(slope * forward(weights).logits))(weights)

    assert relative_gap(gradients.policy, expected(params.policy)) < 1e-5
    found = sums.policy.teacher
    assert found is not None
    for value, name in ((found.divergence, "reverse"), (found.reverse, "reverse"), (found.forward, "forward")):
        means = by_sums(own, others, name, 0.5)[:, :-1][trained[:, 1:]].mean()
        np.testing.assert_allclose(float(value) / tokens, means, rtol=1e-4)
    stops = trained & (np.asarray(batch.tokens) == training.STOP)
    gaps = (np.log(t) - np.log(s))[:, :-1, training.STOP][stops[:, 1:]]
    assert int(stops.sum()) == float(found.stops) > 1
    np.testing.assert_allclose(found.stop_gap, gaps.sum(), rtol=1e-4)


def test_microbatches_chunks_and_shared_prompts_give_the_same_gradient(exact, params, teacher) -> None:
    """Test all at once: one prompt for two rows, two microbatches, three positions of logits at a time."""
    batch = replace(training.ragged_batch(ROWS, LENGTH, failed=FAILED, samples=2), mu=None)
    whole, sums = exact(params, batch, teacher)
    parts = replace(CONTEXT, microbatches=2, logit_chunk=3, samples=2, budget=LENGTH - 5)
    found, other_sums = compiled(parts)(params, batch, teacher)
    assert relative_gap(found.policy, whole.policy) < 1e-5
    reported = [each.policy.teacher for each in (other_sums, sums)]
    # Overlaps are those of some tokens, chosen by the most that a completion may have.
    first, second = (each._replace(overlap=0.0, overlaps=0.0) for each in reported if each is not None)
    np.testing.assert_allclose(first, second, rtol=1e-4)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 2, 2)])
def test_a_teacher_equal_to_the_policy_teaches_nothing_to_the_bit(shape, batch) -> None:
    params = params_on(mesh_of(*shape))
    with jax.set_mesh(mesh_of(*shape)):
        gradients, sums = compiled()(params, batch, params.policy)
    assert sums.policy.teacher is not None
    for name in ("divergence", "reverse", "forward", "stop_gap"):
        assert float(getattr(sums.policy.teacher, name)) == 0.0, name
    assert sums.policy.teacher.overlap == sums.policy.teacher.overlaps > 0
    assert_same_bits(gradients.policy, jax.tree.map(jnp.zeros_like, gradients.policy))


def test_without_weight_the_gradient_has_the_bits_of_rewards_without_teacher(params, teacher) -> None:
    batch = training.ragged_batch(ROWS, LENGTH, failed=FAILED)
    measured = replace(CONTEXT, distillation=replace(EXACT, weight=0.0))
    found, sums = compiled(measured)(params, batch, teacher)
    alone, _ = compiled(replace(CONTEXT, teacher=None, distillation=TeacherConfig()))(params, batch, None)
    assert_same_bits(found.policy, alone.policy)
    assert sums.policy.teacher is not None and float(sums.policy.teacher.divergence) > 0


def test_rewards_and_the_teacher_add_up(exact, params, teacher, batch) -> None:
    """Test that the divergence leaves the gradient of rewards as it is."""
    scored = replace(batch, advantage=training.ragged_batch(ROWS, LENGTH, failed=FAILED).advantage)
    both, _ = exact(params, scored, teacher)
    of_teacher, _ = exact(params, batch, teacher)
    of_rewards, _ = compiled(replace(CONTEXT, teacher=None, distillation=TeacherConfig()))(params, scored, None)
    added = jax.tree.map(jnp.add, of_teacher.policy, of_rewards.policy)
    assert relative_gap(both.policy, added) < 1e-5


def test_a_baseline_is_the_exact_divergence(params, teacher, batch, logits) -> None:
    """Test the advantages of both sampled forms: the gradient is that of -cost times log-prob."""
    own, others = logits
    s, t = softmax(own), softmax(others)
    tokens: np.ndarray = np.asarray(batch.tokens)[:, 1:, None]
    cost = np.take_along_axis(np.log(s / t)[:, :-1], tokens, axis=-1)[..., 0]
    kl = (s * np.log(s / t)).sum(axis=-1)[:, :-1]
    rewards = compiled(replace(CONTEXT, teacher=None, distillation=TeacherConfig()))
    for form, each in (("sampled", cost), ("baseline", cost - kl)):
        found, _ = compiled(replace(CONTEXT, distillation=replace(EXACT, form=form)))(params, batch, teacher)
        advantage = jnp.asarray(-EXACT.weight * np.pad(each, ((0, 0), (1, 0))), jnp.float32)
        expected, _ = rewards(params, replace(batch, advantage=advantage), None)
        assert relative_gap(found.policy, expected.policy) < 1e-5, form


def test_a_teacher_is_needed_exactly_where_one_is_named(params) -> None:
    config = replace(training.CONFIG, teacher=EXACT)
    with refuses("teacher.kind = network: must be none exactly without a teacher"):
        Stages(POLICY, DRAFTER, training.count_fives, config, MESH)
    with refuses("teacher.kind = none: must be none exactly without a teacher"):
        Stages(POLICY, DRAFTER, training.count_fives, training.CONFIG, MESH, teacher=POLICY)


def test_a_teacher_leaves_the_rollout_as_it_is(params) -> None:
    """Test that the traced program of a rollout is the same, so that its tokens are."""
    prompts, step = training.make_prompts(), jnp.int32(0)
    plain = Stages(POLICY, DRAFTER, training.count_fives, training.CONFIG, MESH)
    taught = replace(plain, config=replace(training.CONFIG, teacher=EXACT), teacher=POLICY)
    with jax.set_mesh(MESH):
        programs = [str(jax.make_jaxpr(each.generate)(params, prompts, step, None)) for each in (plain, taught)]
    # Functions that a jaxpr names by their addresses.
    first, second = (re.sub(r"0x[0-9a-f]+", "", program) for program in programs)
    assert first == second


def test_a_probe_runs_the_teacher_as_an_update_does(teacher, batch, logits) -> None:
    """Test what the run returns, so that the time is that of all tokens and of the head."""
    rollout = replace(training.CONFIG.rollout, max_new_tokens=LENGTH - 5, group_size=1)
    config = replace(training.CONFIG, teacher=EXACT, rollout=rollout, microbatches=2)
    stages = Stages(POLICY, DRAFTER, training.count_fives, config, MESH, teacher=POLICY)
    with jax.set_mesh(MESH):
        state = replace(training.state_on(MESH, config), teacher=teacher)
        found = np.asarray(jax.jit(stages.run_teacher)(state, batch))
    best = np.log(softmax(logits[1])).max(axis=-1)
    # A part takes every second row.
    for row in range(ROWS):
        places = np.flatnonzero(np.asarray(batch.completion)[row])
        np.testing.assert_allclose(found[row % 2, row // 2, : len(places)], best[row, places - 1], rtol=1e-4)

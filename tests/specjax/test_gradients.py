from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from specjax.log_probs import laws, positions_at_a_time, teacher_forced
from specjax.sampling import SamplingLaw
from specjax.train.batch import TrainBatch
from specjax.train.gradients import accumulate, log_probs_of
from specjax.train.loss import LossConfig, LossInputs, LossOutput
from specjax.train.loss_context import LossContext
from specjax.train.loss_sums import PolicySums, Sums
from specjax.types import Params
from tests.specjax import training
from tests.specjax.training import AS_SHIPPED, assert_same_bits, mesh_of, networks, params_on, relative_gap

ROWS, LENGTH, FAILED = 8, 14, 5
LAW = SamplingLaw(temperature=0.7)
LOSS = LossConfig(importance_cap=1.5, kl_coefficient=0.3)
POLICY, DRAFTER = networks()
MESH = mesh_of(1, 1, 1)

CONTEXT = LossContext(POLICY, DRAFTER, LAW, LOSS)

Accumulate = Callable[[Params, TrainBatch, jax.Array | None], tuple[Params, Sums]]


def compiled(
    train_draft: bool = True, options: dict[str, Any] | None = None, context: LossContext = CONTEXT
) -> Accumulate:
    def run(params: Params, batch: TrainBatch, reference: jax.Array | None) -> tuple[Params, Sums]:
        return accumulate(replace(context, train_draft=train_draft), params, replace(batch, reference=reference))

    return jax.jit(run, compiler_options=options)


@pytest.fixture(scope="module")
def gradients() -> Accumulate:
    return compiled()


@pytest.fixture(scope="module")
def params() -> Params:
    return params_on(MESH)


@pytest.fixture(scope="module")
def log_probs() -> Callable[[Params, jax.Array], np.ndarray]:
    """Return float64 [R, S, V] from one forward: position t holds the law of token t + 1 at LAW's temperature."""
    forward = jax.jit(lambda params, tokens: POLICY.apply(params.policy, tokens, jnp.zeros(ROWS, jnp.int32)).logits)

    def run(params: Params, tokens: jax.Array) -> np.ndarray:
        scaled = np.asarray(forward(params, tokens), np.float64) / LAW.temperature
        scaled -= scaled.max(axis=-1, keepdims=True)
        return scaled - np.log(np.exp(scaled).sum(axis=-1, keepdims=True))

    return run


def pick(law: np.ndarray, tokens: jax.Array) -> np.ndarray:
    """Return the log-probs of all tokens but the first, float64 [R, S - 1]."""
    return np.take_along_axis(law[:, :-1], np.asarray(tokens)[:, 1:, None], axis=-1)[..., 0]


@pytest.fixture(scope="module")
def batch(params, log_probs) -> TrainBatch:
    """Return a batch whose log-probs at generation are close to those in training."""
    batch = training.ragged_batch(ROWS, LENGTH, failed=FAILED)
    theta = np.pad(pick(log_probs(params, batch.tokens), batch.tokens), ((0, 0), (1, 0)))
    noise = np.random.default_rng(2).normal(0, 0.5, theta.shape)
    return replace(batch, mu=jnp.array(theta + noise, jnp.float32))


@pytest.fixture(scope="module")
def reference(params, batch, log_probs) -> jax.Array:
    theta = pick(log_probs(params, batch.tokens), batch.tokens)
    other = theta + np.random.default_rng(1).normal(0, 0.5, theta.shape)
    return jnp.array(np.pad(other, ((0, 0), (1, 0))), jnp.float32)


def trained_tokens(batch: TrainBatch) -> list[tuple[int, int]]:
    return [
        (row, t) for row in range(ROWS) for t in range(1, LENGTH) if batch.completion[row, t] and batch.counted[row]
    ]


def loss_of(theta: np.ndarray, old: np.ndarray, batch: TrainBatch, reference: np.ndarray) -> float:
    """Return the objective that `accumulate` differentiates, computed token by token. theta, old: [R, S, V]."""
    tokens, total = trained_tokens(batch), 0.0
    for row, t in tokens:
        token, advantage = int(batch.tokens[row, t]), float(batch.advantage[row, t])
        now, before = theta[row, t - 1, token], old[row, t - 1, token]
        ratio = np.exp(now - before)
        surrogate = min(ratio * advantage, np.clip(ratio, 1 - LOSS.clip_low, 1 + LOSS.clip_high) * advantage)
        surrogate *= min(np.exp(before - float(batch.mu[row, t])), LOSS.importance_cap)
        gap = float(reference[row, t]) - now
        total += LOSS.kl_coefficient * (np.exp(gap) - gap - 1) - surrogate
    return total / len(tokens)


def test_losses_per_sequence_do_not_depend_on_microbatches(params, batch, reference, log_probs) -> None:
    """Test GSPO's ratio, an importance weight per sequence, and equal weights of sequences."""
    loss = LossConfig(ratio="sequence", importance="sequence", importance_cap=1.5, aggregate="sequence")
    contexts = (replace(CONTEXT, loss=loss, microbatches=count) for count in (1, 4))
    whole, parts = (compiled(False, context=context)(params, batch, reference) for context in contexts)
    assert relative_gap(parts[0].policy, whole[0].policy) < 1e-5
    theta = pick(log_probs(params, batch.tokens), batch.tokens)
    counts: np.ndarray = np.asarray(batch.trained)[:, 1:]
    old_over_mu = np.exp(np.sum(np.where(counts, theta - np.asarray(batch.mu)[:, 1:], 0.0), axis=1))
    mean_advantage = np.mean(
        np.asarray(batch.advantage)[:, 1:], axis=1, where=counts | ~counts.any(axis=1, keepdims=True)
    )
    expected = -(np.minimum(old_over_mu, 1.5) * mean_advantage)[counts.any(axis=1)].mean()
    for _, sums in (whole, parts):
        np.testing.assert_allclose(sums.policy.loss, expected, rtol=1e-4)


def test_a_custom_loss_reads_only_masked_tokens_and_logs_its_metrics(params, batch, reference) -> None:
    """A custom REINFORCE loss: values outside the mask reach neither loss nor gradient."""

    def reinforce(inputs: LossInputs, config: LossConfig) -> LossOutput:
        metrics = {"better": inputs.advantage > 0, "twice": 2 * inputs.advantage}
        return LossOutput(-inputs.advantage * inputs.theta, metrics)

    run = compiled(False, context=replace(CONTEXT, loss_fn=reinforce))
    expected, sums = run(params, batch, reference)
    trained, each = np.asarray(batch.trained), np.asarray(batch.advantage)
    np.testing.assert_allclose(sums.policy.metrics["twice"], 2 * each[trained].sum(), rtol=1e-4)
    assert float(sums.policy.metrics["better"]) == np.sum(each[trained] > 0)
    dirty = [jnp.where(batch.trained, x, jnp.nan) for x in (batch.mu, batch.advantage, reference)]
    got, found = run(params, replace(batch, mu=dirty[0], advantage=dirty[1]), dirty[2])
    assert_same_bits((got, found), (expected, sums))


def test_the_policy_gradient_is_the_slope_of_the_loss(gradients, params, batch, reference, log_probs) -> None:
    got, sums = gradients(params, batch, reference)
    here = log_probs(params, batch.tokens)
    np.testing.assert_allclose(sums.policy.loss, loss_of(here, here, batch, reference), rtol=1e-5)
    norm = float(np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(got.policy))))
    step = 3e-3

    def moved(by: float) -> float:
        weights = jax.tree.map(lambda w, g: w + g * (by / norm), params.policy, got.policy)
        return loss_of(log_probs(replace(params, policy=weights), batch.tokens), here, batch, reference)

    np.testing.assert_allclose((moved(step) - moved(-step)) / (2 * step), norm, rtol=1e-2)


def test_the_sums_equal_a_slow_reference(gradients, params, batch, reference, log_probs) -> None:
    _, sums = gradients(params, batch, reference)
    law, tokens = log_probs(params, batch.tokens), trained_tokens(batch)
    old = np.array([law[row, t - 1, int(batch.tokens[row, t])] for row, t in tokens])
    mu = np.array([batch.mu[row, t] for row, t in tokens], np.float64)
    k3_gap = np.array([reference[row, t] for row, t in tokens], np.float64) - old
    rows = np.array(tokens)[:, 0]
    sequence_gaps = [np.sum((old - mu)[rows == row]) for row in np.unique(rows)]
    entropy = [-np.sum(np.exp(law[row, t - 1]) * law[row, t - 1]) for row, t in tokens]
    expected = PolicySums(
        tokens=len(tokens),
        sequences=len(sequence_gaps),
        loss=loss_of(law, law, batch, reference),
        kl=np.sum(np.exp(k3_gap) - k3_gap - 1),
        entropy=np.sum(entropy),
        ratio=np.sum(np.exp(old - mu)),
        ratio_max=np.max(np.exp(old - mu)),
        gap=np.sum(np.abs(old - mu)),
        gap_max=np.max(np.abs(old - mu)),
        sequence_gap=np.sum(np.abs(sequence_gaps)),
        sequence_gap_max=np.max(np.abs(sequence_gaps)),
        metrics={"clip_fraction": 0},
    )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4), sums.policy, expected)
    assert sums.draft.tokens == int(batch.completion.sum())


def test_training_the_draft_leaves_every_bit_of_the_policy_gradient(params, batch, reference) -> None:
    on, _ = compiled(options=AS_SHIPPED)(params, batch, reference)
    off, sums = compiled(False, AS_SHIPPED)(params, batch, reference)
    assert_same_bits(off.policy, on.policy)
    assert all(not np.asarray(x).any() for x in jax.tree.leaves(off.draft))
    # A frozen draft is measured too.
    assert sums.draft.loss > 0
    assert any(np.asarray(x).any() for x in jax.tree.leaves(on.draft))


def test_neither_gradient_depends_on_the_others_inputs(gradients, params, batch, reference) -> None:
    before, _ = gradients(params, batch, reference)
    other_draft = replace(params, draft=jax.tree.map(lambda x: x * 1.5, params.draft))
    after, _ = gradients(other_draft, batch, reference)
    assert_same_bits(after.policy, before.policy)
    assert relative_gap(after.draft, before.draft) > 1e-2
    after, _ = gradients(params, replace(batch, advantage=-2 * batch.advantage), reference)
    assert_same_bits(after.draft, before.draft)
    assert relative_gap(after.policy, before.policy) > 1e-2


def test_the_draft_loss_has_no_slope_in_the_policy(params, batch, reference) -> None:
    def draft_loss(params: Params) -> jax.Array:
        return accumulate(CONTEXT, params, replace(batch, reference=reference))[1].draft.loss

    slope = jax.jit(jax.grad(draft_loss))(params)
    assert all(not np.asarray(x).any() for x in jax.tree.leaves(slope.policy))
    assert any(np.asarray(x).any() for x in jax.tree.leaves(slope.draft))


def test_a_failed_sample_trains_only_the_draft(gradients, params, batch, reference) -> None:
    with_failed, sums = gradients(params, batch, reference)
    absent = replace(batch, completion=batch.completion.at[FAILED].set(False), counted=jnp.ones(ROWS, bool))
    without, sums_without = gradients(params, absent, reference)
    assert sums.policy.tokens == sums_without.policy.tokens
    assert relative_gap(with_failed.policy, without.policy) < 1e-6
    assert relative_gap(with_failed.draft, without.draft) > 1e-2
    all_scored, _ = gradients(params, replace(batch, counted=jnp.ones(ROWS, bool)), reference)
    assert_same_bits(all_scored.draft, with_failed.draft)
    nothing, sums = gradients(params, replace(batch, counted=jnp.zeros(ROWS, bool)), reference)
    assert all(not np.asarray(x).any() for x in jax.tree.leaves(nothing.policy))
    assert all(np.isfinite(x) for x in jax.tree.leaves(sums))


def test_without_mu_the_importance_weight_is_one(gradients, params, batch, reference, log_probs) -> None:
    theta = pick(log_probs(params, batch.tokens), batch.tokens)
    recorded = jnp.array(np.pad(theta, ((0, 0), (1, 0))), jnp.float32)
    expected, _ = gradients(params, replace(batch, mu=recorded), reference)
    got, sums = gradients(params, replace(batch, mu=None), reference)
    assert relative_gap(got.policy, expected.policy) < 1e-5
    assert sums.policy.ratio == sums.policy.tokens and sums.policy.gap == 0


def test_log_probs_of_another_policy_are_those_of_the_tokens_in_order(params, batch, log_probs) -> None:
    """The log-probs do not depend on the windows."""
    run = jax.jit(partial(log_probs_of, replace(CONTEXT, microbatches=4, ladder=(8, 10)), mesh=MESH))
    expected = np.pad(pick(log_probs(params, batch.tokens), batch.tokens), ((0, 0), (1, 0)))
    with jax.set_mesh(MESH):
        got = run(params.policy, batch)
    np.testing.assert_allclose(got, np.where(batch.completion, expected, 0.0), atol=1e-5)


def test_in_bfloat16_the_weights_are_multiplied_in_bfloat16_and_their_gradients_are_float32(params, batch) -> None:
    context = LossContext(*networks("bfloat16"), LAW)
    traced = jax.make_jaxpr(lambda params: accumulate(context, params, batch)[0])(params)
    assert {x.dtype for x in traced.out_avals} == {jnp.dtype("float32")}
    products = [
        {str(x.aval.dtype) for x in line.invars} for line in lines(traced.jaxpr) if line.primitive.name == "dot_general"
    ]
    # Only attention's scores and weights are float32.
    assert len(products) > 50 and products.count({"bfloat16"}) > 0.7 * len(products)


def lines(jaxpr: Any) -> Iterator[Any]:
    for line in jaxpr.eqns:
        yield line
        for inner in jaxprs_in_params(line.params):
            yield from lines(inner)


def test_large_logits_are_computed_in_chunks_and_small_ones_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of a device bound a chunk: the mesh divides rows and vocabulary."""
    rows, width, vocab = ROWS, LENGTH, POLICY.vocab_size
    chunk = partial(positions_at_a_time, vocab, rows, width)
    assert chunk(None) == 0 and chunk(3) == 3
    monkeypatch.setattr("specjax.log_probs.LOGIT_BYTES", 4 * rows * vocab * 3 + 5)
    assert chunk(None) == 3 and chunk(0) == 0
    for shape in ((2, 1, 1), (1, 2, 1), (1, 1, 2)):
        with jax.set_mesh(mesh_of(*shape)):
            assert chunk(None) == 6
    weights, tokens = params_on(MESH).policy, jnp.zeros((rows, width), jnp.int32)
    output = jax.eval_shape(lambda: teacher_forced(POLICY, weights, tokens))
    assert laws(weights, output, LAW).chunk(rows, width) == 3
    assert output.logits.shape == (rows, 0, vocab)

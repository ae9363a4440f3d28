"""Adapters in the one program: off at B = 0, the gradient of the full one, a base that never changes."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import chex
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from models.decoder import init_decoder
from models.drafts.block import block_like, init_block, make_block
from models.lora import LoraConfig, adapted_layers, init_adapters, with_scales
from models.params import init_params, param_shardings
from specjax.adapters import joined, merged
from specjax.keys import seed_step
from specjax.quantization import dequantized, quantized, rollout_copy
from specjax.rollout.generate import make_prepare
from specjax.rollout.make_generate import make_generate
from specjax.testing import assert_cache_consistent, assert_same_rollout
from specjax.train.batch import Sequences, TrainBatch
from specjax.train.draft.distill import make_predict
from specjax.train.draft.loss import add_replay_gradient
from specjax.train.gradients import accumulate, log_probs_of
from specjax.train.loss import LossConfig
from specjax.train.loss_sums import Sums
from specjax.train.stages import Stages
from specjax.train.state import init_train_state
from specjax.train.train_step import make_train_step
from specjax.types import EightBit, Params, PyTree
from tests.specjax.training import (
    CONFIG,
    DECODER,
    GROUP,
    assert_same_bits,
    count_fives,
    host_copy,
    make_prompts,
    mesh_of,
    networks,
    params_on,
    ragged_batch,
    relative_gap,
)

LORA = LoraConfig(rank=3, alpha=6.0)
LAYERS = adapted_layers(partial(init_decoder, DECODER), LORA)


def adapted_params(mesh: Mesh, b_scale: float = 0.0, base_dtype: EightBit | None = None) -> Params:
    """Return `params_on` with the policy as the base, and adapters whose B is random, `b_scale` large."""
    full, init = params_on(mesh), partial(init_adapters, LAYERS)
    adapters = init_params(init, jax.random.key(1), mesh)
    if b_scale:
        rng = np.random.default_rng(2)
        drawn = jax.tree.map(lambda x: np.float32(b_scale * rng.standard_normal(x.shape)), adapters)
        adapters = jax.device_put(drawn, param_shardings(init, mesh))
    base = full.policy if base_dtype is None else quantized(full.policy, base_dtype)
    return Params(adapters, full.draft, base=with_scales(base, LAYERS, mesh))


@cache
def gradients_on(mesh: Mesh) -> Callable[[Params, TrainBatch], tuple[Params, Sums]]:
    """Return the program that accumulates gradients and sums of a batch like `ragged_batch(8, 26, samples=GROUP)`."""
    batch = ragged_batch(8, 26, samples=GROUP)
    context = replace(Stages(*networks(), count_fives, CONFIG, mesh).loss_context(batch), anchors=0)
    return jax.jit(partial(accumulate, context))


def test_fresh_adapters_change_no_token_or_log_prob():
    mesh, config = mesh_of(2), replace(CONFIG.rollout, verifier="coupled")
    generate = make_generate(*networks(), config, mesh)
    rollout, expected = (generate(x, make_prompts(), seed_step(7, 0)) for x in (adapted_params(mesh), params_on(mesh)))
    for name in ("tokens", "lengths", "law", "full", "accepted", "drafted"):
        np.testing.assert_array_equal(getattr(rollout, name), getattr(expected, name), err_msg=name)


def test_gradients_are_those_of_the_full_gradient():
    """dA = s G B^T and dB = s A^T G, where G is the gradient of W + s A B. At B = 0 losses do not change."""
    mesh = mesh_of()
    params, batch = adapted_params(mesh, b_scale=0.3), ragged_batch(8, 26, samples=GROUP)
    run = gradients_on(mesh)
    found, full = run(params, batch)[0], run(merged(params), batch)[0]
    assert relative_gap(found.draft, full.draft) < 1e-5
    expected = {}
    for layer in LAYERS:
        base, adapter, gradient = params.base, params.policy, full.policy
        for name in layer.path:
            base, adapter, gradient = base[name], adapter[name], gradient[name]
        size = int(np.prod(layer.into))
        full_gradient = np.asarray(gradient["kernel"], np.float64).reshape(size, -1)
        a, b = (np.asarray(adapter[name], np.float64) for name in ("lora_a", "lora_b"))
        a_gradient = layer.scale * full_gradient @ b.reshape(layer.rank, -1).T
        b_gradient = layer.scale * a.reshape(size, -1).T @ full_gradient
        expected[layer.path] = {"lora_a": a_gradient.reshape(a.shape), "lora_b": b_gradient.reshape(b.shape)}
    assert relative_gap(found.policy, flax.traverse_util.unflatten_dict(expected)) < 1e-5
    fresh, plain = (run(x, batch)[1] for x in (adapted_params(mesh), params_on(mesh)))
    chex.assert_trees_all_equal(fresh, plain)


def test_a_draft_learns_from_features_of_the_merged_policy():
    """Also from earlier rollouts; and its acceptance is predicted for that policy."""
    mesh = mesh_of()
    policy, drafter = networks()
    params, batch = adapted_params(mesh, b_scale=0.3), ragged_batch(8, 26, samples=GROUP)
    context = replace(Stages(policy, drafter, count_fives, CONFIG, mesh).loss_context(batch), anchors=0)
    rows = Sequences(batch.tokens, batch.completion)
    predict = make_predict(policy, drafter, context.law, mesh)

    @jax.jit
    def replayed(params: Params) -> PyTree:
        zeros, again = jax.tree.map(jnp.zeros_like, params.draft), jax.tree.map(lambda x: x[None], rows)
        return add_replay_gradient(context, params, jnp.float32(1), again, zeros)

    found, full, off = ((replayed(x), predict(x, rows)[0]) for x in (params, merged(params), params_on(mesh)))
    for part in range(2):
        assert relative_gap(found[part], full[part]) < 1e-5
        assert relative_gap(off[part], full[part]) > 0.01


def test_merged_equals_unmerged_and_the_base_is_the_reference():
    mesh = mesh_of()
    policy, drafter = networks()
    params, batch = adapted_params(mesh, b_scale=0.3), ragged_batch(8, 26, samples=GROUP)
    context = replace(Stages(policy, drafter, count_fives, CONFIG, mesh).loss_context(batch), anchors=0)
    run = jax.jit(partial(log_probs_of, context, mesh=mesh))
    unmerged, in_one, off = (run(x.policy, batch) for x in (joined(params), merged(params), params_on(mesh)))
    np.testing.assert_allclose(unmerged, in_one, atol=1e-5)
    assert np.abs(np.asarray(unmerged) - np.asarray(off)).max() > 0.1
    config = replace(CONFIG, loss=LossConfig(kl_coefficient=0.1))
    state = init_train_state(params, config, mesh, with_reference=True)
    reference = jax.jit(Stages(policy, drafter, count_fives, config, mesh).logprob)(state, batch).reference
    np.testing.assert_array_equal(reference, off)


@pytest.mark.parametrize("base_dtype", [None, "int8"])
def test_a_base_that_rollouts_read_as_it_is_is_not_copied(base_dtype: EightBit | None):
    for mesh, shared in ((mesh_of(), True), (mesh_of(1, 2), False)):
        params = adapted_params(mesh, base_dtype=base_dtype)
        with jax.set_mesh(mesh):
            prepared = make_prepare(*networks(), params)(params)
        base, kernel = (x["layer_0"]["mlp"]["up"] for x in (params.base, prepared.policy))
        of_base, of_copy = jax.tree.leaves(base["kernel"])[0], jax.tree.leaves(kernel["kernel"])[0]
        assert (of_copy is of_base) == shared and of_copy.sharding.is_fully_replicated
        assert set(kernel) == {"kernel", "lora_a", "lora_b", "lora_scale"}


def test_merged_rollouts_are_of_the_merged_policy_and_their_gap_is_measured():
    mesh = mesh_of()
    policy, drafter = networks()
    config = replace(CONFIG, rollout=replace(CONFIG.rollout, verifier="coupled"))
    merging, params = replace(policy, merged=True), adapted_params(mesh, b_scale=0.3)
    with jax.set_mesh(mesh):
        prepared = make_prepare(merging, drafter, params)(params)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), prepared.policy, merged(params).policy)
    expected = make_generate(policy, drafter, config.rollout, mesh)(prepared, make_prompts(), seed_step(config.seed, 0))
    state = init_train_state(params, config, mesh)
    _, rollout, metrics = make_train_step(merging, drafter, count_fives, config, mesh)(state, make_prompts())
    for name in ("tokens", "lengths", "accepted", "drafted"):
        np.testing.assert_array_equal(getattr(rollout, name), getattr(expected, name), err_msg=name)
    assert 0 < float(metrics["rollout/logprob_gap_mean"]) < 1e-5


@pytest.mark.parametrize("block", [pytest.param(False, marks=pytest.mark.slow), True], ids=["eagle3", "dspark"])
def test_rollouts_with_adapters_are_those_of_plain_decoding_and_have_its_caches(block: bool):
    (policy, drafter), params = networks(), adapted_params(mesh_of(), b_scale=0.3)
    if block:
        heads = dict(markov_rank=3, enable_confidence_head=True, confidence_head_with_markov=True)
        head = block_like(DECODER, CONFIG.rollout.draft_length, num_layers=1, **heads)
        draft = init_params(partial(init_block, head), jax.random.key(2), mesh_of())
        drafter, params = make_block(head, policy), replace(params, draft=draft)
    proof = policy, drafter, params, make_prompts()
    config = replace(CONFIG.rollout, verifier="coupled")
    rollout = assert_same_rollout(*proof, config)
    assert np.sum(rollout.accepted) > 0 and len(assert_cache_consistent(*proof, config)) > 1


@pytest.mark.parametrize("to", ["int8", "fp8"])
def test_gradients_beside_8_bits_are_those_beside_what_they_stand_for_on_every_mesh(to: EightBit):
    batch, found = ragged_batch(8, 26, samples=GROUP), []
    for mesh in (mesh_of(), mesh_of(1, 2, 2)):
        params = adapted_params(mesh, 0.3, to)
        with jax.set_mesh(mesh):
            found.append(host_copy(gradients_on(mesh)(params, batch)[0]))
    params = adapted_params(mesh_of(), 0.3, to)
    wide = replace(params, base=dequantized(params.base))
    expected = gradients_on(mesh_of())(wide, batch)[0]
    for gradients in found:
        assert relative_gap(gradients.policy, expected.policy) < 1e-5
        assert relative_gap(gradients.draft, expected.draft) < 1e-5


def test_a_base_in_8_bits_never_changes_and_samples_the_same_tokens_on_every_mesh():
    policy, drafter = networks()
    config = replace(CONFIG, rollout=replace(CONFIG.rollout, verifier="coupled"))
    one, many = mesh_of(), mesh_of(1, 2, 2)
    generate = make_generate(policy, drafter, config.rollout, one)
    rollout = generate(adapted_params(one, 0.3, "int8"), make_prompts(), seed_step(7, 0))
    step = make_train_step(policy, drafter, count_fives, config, many)
    state = init_train_state(adapted_params(many, 0.3, "int8"), config, many)
    base, adapters = host_copy(state.params.base), host_copy(state.params.policy)
    state, trained_on, _ = step(state, make_prompts())
    np.testing.assert_array_equal(trained_on.tokens, rollout.tokens)
    state, _, metrics = step(state, make_prompts())
    assert_same_bits(state.params.base, base)
    assert relative_gap(state.params.policy, adapters) > 0
    # One policy in rollouts and in training.
    assert float(metrics["rollout/logprob_gap_mean"]) < 1e-5


def test_a_scale_is_not_rounded_for_rollouts():
    copied = rollout_copy(adapted_params(mesh_of()).base, jnp.dtype("bfloat16"), None)["layer_0"]["mlp"]["up"]
    assert (copied["kernel"].dtype, copied["lora_scale"].dtype) == ("bfloat16", "float32")

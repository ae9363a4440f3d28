from dataclasses import replace
from functools import cache, partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from models.decoder import init_decoder, make_policy
from models.drafts.eagle3 import init_eagle3, make_eagle3
from models.params import abstract_params
from specjax.checkpoint_integrity import check_finite
from specjax.drafters import Drafter, HeadDrafter, ModelDrafter
from specjax.keys import seed_step
from specjax.quantization import QuantizedKernel, dequantized, project, quantize, quantized, rollout_copy
from specjax.rollout.generate import copy_on, make_prepare, per_shard, place, prepare
from specjax.rollout.make_generate import make_generate
from specjax.rollout.speculative import speculative_rollout
from specjax.testing.hlo import Program
from specjax.types import EightBit, Params, Rollout
from tests.specjax.training import CONFIG, DECODER, HEAD, make_prompts, mesh_of, networks, params_on

FORMATS: tuple[EightBit, ...] = ("int8", "fp8")
POLICY, DRAFTER = networks()
COUPLED, PHASES = replace(CONFIG.rollout, verifier="coupled"), ((3, 12), (2, 100))


def drafter_in(to: EightBit | None, drafter: HeadDrafter = DRAFTER) -> HeadDrafter:
    return replace(drafter, head=replace(drafter.head, eight_bit=to))


def is_quantized(x: object) -> bool:
    return isinstance(x, QuantizedKernel)


@pytest.mark.parametrize(("to", "error"), [("int8", 0.5 / 127), ("fp8", 2**-4)])
@pytest.mark.parametrize(("shape", "contract"), [((6, 3, 4), 1), ((3, 4, 6), 2)])
def test_every_weight_is_within_half_a_step_of_its_channel_and_products_are_scaled(to, error, shape, contract) -> None:
    rng, axes = np.random.default_rng(0), tuple(range(contract))
    kernel = rng.normal(size=shape).astype(np.float32)
    kernel[..., 1] = 0.0
    most = np.abs(kernel).max(axis=axes)
    found = quantize(jnp.asarray(kernel), contract, to)
    back = np.asarray(found.values, np.float64) * np.asarray(found.scale, np.float64)
    assert found.values.dtype.itemsize == 1 and found.scale.shape == shape[contract:]
    # e4m3 has three bits of mantissa, so half a step is 1/16 of the weight, or of the smallest normal number.
    step = most if to == "int8" else np.maximum(np.abs(kernel), most * 2**-6 / 448)
    assert (np.abs(back - kernel) <= error * step * 1.001).all()
    np.testing.assert_allclose(np.abs(back).max(axis=axes), most, rtol=1e-6)
    for dtype, close in (("float32", 1e-5), ("bfloat16", 0.02)):
        x = jnp.asarray(rng.normal(size=(2, 5, *shape[:contract])), dtype)
        product, wanted = project(x, found, contract), np.tensordot(np.asarray(x, np.float64), back, axes=contract)
        assert product.dtype == jnp.dtype(dtype)
        np.testing.assert_allclose(np.asarray(product, np.float64), wanted, rtol=close, atol=0.05)


@pytest.mark.parametrize(("to", "error"), [("int8", 0.02), ("fp8", 0.1)])
def test_all_kernels_of_both_networks_are_quantized_and_nothing_else(to: EightBit, error: float) -> None:
    params, prompts = params_on(mesh_of(1)), make_prompts()
    start, apply = np.zeros(len(prompts.tokens), np.int32), jax.jit(POLICY.apply)
    wanted = apply(params.policy, prompts.tokens, start).logits
    copied = jax.jit(partial(prepare, replace(POLICY, eight_bit=to), drafter_in(to)))(params)
    for network in (copied.policy, copied.draft):
        for path, x in jax.tree.leaves_with_path(network, is_leaf=is_quantized):
            assert is_quantized(x) == (path[-1].key == "kernel")
    found = apply(copied.policy, prompts.tokens, start).logits
    assert 0 < np.std(np.asarray(found) - np.asarray(wanted)) / np.std(np.asarray(wanted)) < error


@cache
def rollout_of(to: EightBit | None) -> Rollout:
    generate = make_generate(POLICY, drafter_in(to), COUPLED, mesh_of(1))
    return generate(params_on(mesh_of(1)), make_prompts(), seed_step(7, 0))


def acceptance(rollout: Rollout) -> float:
    return float(np.sum(rollout.accepted) / np.sum(rollout.drafted))


@pytest.mark.parametrize("to", FORMATS)
def test_coupled_tokens_do_not_depend_on_the_drafts_bits(to: EightBit) -> None:
    np.testing.assert_array_equal(rollout_of(to).tokens, rollout_of(None).tokens)
    assert abs(acceptance(rollout_of(to)) - acceptance(rollout_of(None))) < 0.02


def test_a_mesh_holds_the_prepared_parameters_gathered_and_samples_the_same_tokens() -> None:
    """Some sequences of each shard wait, and windows grow."""
    mesh, drafter = mesh_of(2, 2, 2), drafter_in("int8")
    params = params_on(mesh)
    with jax.set_mesh(mesh):
        ready = make_prepare(POLICY, drafter, params)(params)
        generate = per_shard(speculative_rollout, POLICY, drafter, replace(COUPLED, phases=PHASES), mesh)
        found = jax.jit(generate)(ready, place(make_prompts(), mesh), seed_step(7, 0), None)
    for name in ("tokens", "lengths", "stopped"):
        np.testing.assert_array_equal(getattr(found, name), getattr(rollout_of(None), name), err_msg=name)
    for name in ("full", "law"):
        np.testing.assert_allclose(getattr(found, name), getattr(rollout_of(None), name), atol=1e-4, err_msg=name)
    for network in (ready.policy, ready.draft):
        axes = [set(jax.tree.leaves(tuple(x.sharding.spec))) for x in jax.tree.leaves(network)]
        assert {"tensor"} in axes and not any({"data", "fsdp"} & names for names in axes)


def test_the_decode_loop_carries_the_drafts_kernels_in_8_bits_alone() -> None:
    """Otherwise each draft step would read a copy in the compute dtype, made before the loop."""
    policy, mesh = make_policy(replace(DECODER, dtype="bfloat16")), mesh_of(1)
    head = replace(HEAD, dtype="bfloat16", intermediate_size=24)
    drafter = drafter_in("int8", make_eagle3(head, policy))
    inits = partial(init_decoder, DECODER), partial(init_eagle3, head)
    params = Params(*(abstract_params(init, mesh) for init in inits))
    generate = per_shard(speculative_rollout, policy, drafter, COUPLED, mesh)
    with jax.set_mesh(mesh):
        run = jax.jit(lambda params, *others: generate(prepare(policy, drafter, params), *others, None))
        program = Program(run.lower(params, place(make_prompts(), mesh), seed_step(7, 0)).compile().as_text())
    loops = [x for lines in program.computations.values() for x in lines if x.opcode == "while"]
    carried = {(dtype, dims) for x in loops for dtype, dims in zip(x.dtypes, x.arrays, strict=True)}
    assert {("s8", x.shape) for x in jax.tree.leaves(params.draft) if x.ndim > 1} <= carried
    # Only the draft has kernels of these sizes: the MLP's and the queries', flattened or not.
    own = {(16, 24), (24, 16), (32, 32), (32, 4, 8)}
    assert own & {dims for _, dims in carried} and not own & {dims for dtype, dims in carried if dtype != "s8"}


def test_a_small_model_as_the_draft_is_quantized_too() -> None:
    drafter: Drafter = ModelDrafter(replace(POLICY, eight_bit="fp8"))
    assert drafter.eight_bit == "fp8"
    copied = jax.eval_shape(lambda x: rollout_copy(x, POLICY.dtype, drafter.eight_bit), params_on(mesh_of(1)).policy)
    assert any(map(is_quantized, jax.tree.leaves(copied, is_leaf=is_quantized)))


@pytest.mark.parametrize("to", FORMATS)
def test_a_network_is_quantized_where_it_lies_and_its_copy_keeps_the_bits(to: EightBit) -> None:
    mesh = mesh_of(1, 2, 2)
    copy = jax.jit(lambda params: rollout_copy(params, jnp.dtype("float32"), to))
    params, expected = params_on(mesh), copy(params_on(mesh_of(1)).policy)
    abstract = quantized(abstract_params(partial(init_decoder, DECODER), mesh), to)
    kernels = params.policy["layer_0"]["attention"]
    base = quantized(params.policy, to)
    assert kernels["q"]["kernel"].is_deleted() and not params.policy["norm"]["scale"].is_deleted()
    described = [jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), tree) for tree in (base, abstract)]
    chex.assert_trees_all_equal_structs(*described)
    assert jax.tree.leaves(described[0]) == jax.tree.leaves(described[1])
    assert base["layer_0"]["mlp"]["down"]["kernel"].scale.sharding.spec == P("fsdp")
    check_finite(base, "base")
    bfloat16 = replace(POLICY, dtype=jnp.dtype("bfloat16"))
    params = replace(params, policy=base)
    with jax.set_mesh(mesh):
        ready = make_prepare(bfloat16, DRAFTER, params)(params).policy
    there = copy_on(mesh, bfloat16, DRAFTER, params).policy
    for x, y, copied, shape in zip(*map(jax.tree.leaves, (base, expected, ready, there)), strict=True):
        assert (copied.shape, copied.dtype) == (shape.shape, shape.dtype) and copied.sharding == shape.sharding
        assert "fsdp" not in jax.tree.leaves(tuple(copied.sharding.spec))
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))
    pairs = (jax.tree.leaves(tree, is_leaf=is_quantized) for tree in (base, ready))
    for x, copied in zip(*pairs, strict=True):
        if is_quantized(x):
            assert copied.scale.dtype == jnp.float32 and copied.values.dtype == x.values.dtype
            np.testing.assert_array_equal(copied.values.astype("float32"), x.values.astype("float32"))
            np.testing.assert_array_equal(copied.scale, x.scale)


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize(("name", "shape", "contract"), [("q", (6, 3, 4), 1), ("o", (3, 4, 6), 2)])
def test_gradients_pass_a_kernel_in_8_bits_and_no_wider_copy_is_kept(to, name, shape, contract) -> None:
    rng = np.random.default_rng(0)
    kernel = quantize(jnp.asarray(rng.normal(size=shape), jnp.float32), contract, to)
    wide = dequantized({name: {"kernel": kernel}})[name]["kernel"]

    def loss(x: jax.Array, kernel: jax.Array | QuantizedKernel) -> jax.Array:
        """Return a loss through a scan over rows, each computed again for the backward pass."""
        product = jax.checkpoint(lambda x: jnp.sin(project(x, kernel, contract).astype("float32")).sum())
        return jax.lax.scan(lambda total, x: (total + product(x), None), jnp.float32(0), x)[0]

    gradient = jax.jit(jax.grad(loss))
    for dtype, close in (("float32", 1e-5), ("bfloat16", 0.1)):
        x = jnp.asarray(rng.normal(size=(2, 5, *shape[:contract])), dtype)
        found, wanted = gradient(x, kernel), gradient(x.astype("float32"), wide)
        assert found.dtype == x.dtype
        np.testing.assert_allclose(found.astype("float32"), wanted, atol=close)
        kept = jax.tree.leaves(jax.vjp(lambda x: project(x, kernel, contract), x)[1])
        assert {x.dtype for x in kept if x.shape == shape} == {kernel.values.dtype}

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.decoder import init_decoder, make_policy
from models.drafts.eagle3 import init_eagle3, make_eagle3
from models.params import abstract_params
from specjax import kernels
from specjax.keys import seed_step
from specjax.rollout.generate import make_prepare, per_shard, place, prepare
from specjax.rollout.make_generate import make_generate
from specjax.rollout.plan import RolloutConfig
from specjax.rollout.speculative import speculative_rollout
from specjax.testing.hlo import Program
from specjax.types import Params, Rollout
from tests.specjax import training
from tests.specjax.training import AS_SHIPPED, CONFIG, DECODER, HEAD, make_prompts, mesh_of, networks, params_on

POLICY, DRAFTER = networks()
COUPLED = replace(CONFIG.rollout, verifier="coupled")


def generate_on(*shape: int, config: RolloutConfig = COUPLED) -> Callable[..., Rollout]:
    return make_generate(POLICY, DRAFTER, config, mesh_of(*shape))


@pytest.fixture(scope="module")
def single() -> Callable[..., Rollout]:
    return generate_on(1, 1, 1)


@pytest.fixture(scope="module")
def expected(single) -> Rollout:
    return single(params_on(mesh_of(1)), make_prompts(), seed_step(7, 0))


def test_the_completions_are_well_formed(expected) -> None:
    tokens, lengths, stopped = (np.asarray(x) for x in (expected.tokens, expected.lengths, expected.stopped))
    assert tokens.shape == (8 * training.GROUP, training.BUDGET)
    assert stopped.any() and not stopped.all() and len(np.unique(lengths)) > 3
    for row, length, stop in zip(tokens, lengths, stopped, strict=True):
        assert (row[length:] == 0).all() and training.STOP not in row[: length - 1]
        assert stop == (row[length - 1] == training.STOP) and (stop or length == training.BUDGET)


def test_parameters_without_a_mesh_are_prepared_in_place() -> None:
    params = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), params_on(mesh_of(1)))
    ready = make_prepare(POLICY, DRAFTER, params)(params)
    jax.tree.map(np.testing.assert_array_equal, ready.draft, params.draft)


@pytest.mark.slow
@pytest.mark.parametrize("k, shape, phases", [(4, (2, 2, 2), ((3, 12), (2, 100))), (0, (1, 4, 2), ((5, 100),))])
def test_eight_devices_sample_the_same_coupled_tokens_at_any_draft_length(k, shape, phases, expected) -> None:
    """Some sequences of each shard wait, and windows grow.

    test_quantization.py has a fast test of one mesh, test_meshes.py of whole steps.
    """
    generate = generate_on(*shape, config=replace(COUPLED, draft_length=k, phases=phases))
    rollout = generate(params_on(mesh_of(*shape)), make_prompts(), seed_step(7, 0))
    assert (np.asarray(rollout.drafted).sum() > 0) == (k > 0)
    for name in ("tokens", "lengths", "stopped"):
        np.testing.assert_array_equal(getattr(rollout, name), getattr(expected, name), err_msg=name)
    np.testing.assert_allclose(rollout.full, expected.full, atol=1e-4)
    np.testing.assert_allclose(rollout.law, expected.law, atol=1e-4)


def test_a_second_call_compiles_nothing_and_seed_and_step_change_tokens(single, expected) -> None:
    """The parameters survive."""
    params, seen = params_on(mesh_of(1)), [np.asarray(expected.tokens).tobytes()]
    for seed, step in ((7, 0), (7, 1), (8, 0)):
        noise = seed_step(seed, step)
        with jax.no_tracing():
            seen.append(np.asarray(single(params, make_prompts(), noise).tokens).tobytes())
    assert seen[0] == seen[1] and len(set(seen)) == 3
    assert not any(x.is_deleted() for x in jax.tree.leaves(params))


def test_place_splits_the_prompts_in_order() -> None:
    prompts = place(make_prompts(), mesh_of(2, 2, 2))
    shards = sorted(prompts.id.addressable_shards, key=lambda shard: shard.device.id)
    np.testing.assert_array_equal(prompts.id, make_prompts().id)
    assert [shard.index[0].start for shard in shards] == [0, 0, 2, 2, 4, 4, 6, 6]


def test_prepare_casts_to_the_compute_dtype() -> None:
    policy, drafter = networks("bfloat16")
    params = params_on(mesh_of(1))
    assert {x.dtype for x in jax.tree.leaves(prepare(policy, drafter, params))} == {jnp.dtype("bfloat16")}
    assert {x.dtype for x in jax.tree.leaves(prepare(POLICY, DRAFTER, params))} == {jnp.dtype("float32")}


@pytest.mark.parametrize(("rows", "kv_heads"), [pytest.param(1, 2, marks=pytest.mark.slow), (2, 1)])
def test_no_cache_is_copied_while_decoding_where_there_is_one_row_or_one_head(rows, kv_heads) -> None:
    """Compiled with XLA's default flags, at two draft lengths. test_meshes.py has more cases."""
    decoder, head = (replace(shape, num_kv_heads=kv_heads, head_dim=32) for shape in (DECODER, HEAD))
    policy = make_policy(decoder)
    config = replace(CONFIG.rollout, group_size=1, draft_lengths=(0, 2), max_new_tokens=200)
    generate = per_shard(speculative_rollout, policy, make_eagle3(head, policy), config, mesh_of(1))
    params = Params(*(abstract_params(init) for init in (partial(init_decoder, decoder), partial(init_eagle3, head))))
    prompts = make_prompts(rows)
    with jax.set_mesh(mesh_of(1)):
        run = jax.jit(generate, compiler_options=AS_SHIPPED | kernels.compiler_options(policy.dtype))
        program = Program(run.lower(params, prompts, seed_step(7, 0), jnp.zeros(1, jnp.int32)).compile().as_text())
    length = prompts.tokens.shape[1] + config.max_new_tokens + config.slack
    keys = (rows, kv_heads, length, 32) if rows > 1 else (kv_heads, length, 32)[kv_heads == 1 :]
    loops = program.loops(carries=keys, times=2 * DECODER.num_layers)
    assert len(loops) == len(config.draft_lengths)
    for loop in loops:
        assert any(line.opcode == "dot" for line in loop)
        assert not [line.line for line in program.copies(loop, int(np.prod(keys)))]
    if jax.__version_info__ >= (0, 11):
        return  # Newer XLA (jax 0.12) copies every array that a branch writes to.
    switch = program.switch(len(loops), carries=keys, times=2 * DECODER.num_layers)
    assert not [line.line for line in switch if line.opcode == "copy" and line.elements >= np.prod(keys)]

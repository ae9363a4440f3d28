"""One step on several meshes: the same tokens and gradients, no collectives between data shards, and the probe step."""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from models.drafts.block import block_like, init_block, make_block
from models.params import abstract_params, param_shardings
from specjax.keys import seed_step
from specjax.parallel.mesh import batch_shards
from specjax.rewards import RewardFn, host_reward
from specjax.rollout.generate import per_shard, place
from specjax.rollout.make_generate import make_generate
from specjax.rollout.plan import lay_out
from specjax.rollout.speculative import speculative_rollout
from specjax.testing.hlo import Program, collectives, within_shard
from specjax.train.config import TrainConfig
from specjax.train.gradients import accumulate
from specjax.train.loss import LossConfig
from specjax.train.metrics import Metrics
from specjax.train.stages import Stages
from specjax.train.state import init_train_state
from specjax.train.timed_step import ProbeStep
from specjax.train.train_step import make_train_step
from specjax.types import Params, Rollout, TrainState
from tests.specjax.test_adapters import adapted_params
from tests.specjax.training import (
    BUDGET,
    CONFIG,
    DECODER,
    GROUP,
    count_fives,
    host_copy,
    last_gradients,
    make_prompts,
    mesh_of,
    networks,
    params_on,
    ragged_batch,
    relative_gap,
    state_on,
)

POLICY, DRAFTER = networks(unroll=2)
MICROBATCHES = {(8, 1, 1): 2, (2, 2, 2): 4, (1, 4, 2): 2}
FOUR_BY_TWO = pytest.param((1, 4, 2), marks=pytest.mark.slow)
SHARDED = [pytest.param((8, 1, 1), marks=pytest.mark.slow), (2, 2, 2), FOUR_BY_TWO]
# With adapters, verified by `coupled`.
ADAPTED = [(1, 2, 2), (2, 1, 1), (1, 2, 1), (1, 1, 2)]
CALLS: list[int] = []


def count_fives_on_the_host(tokens: np.ndarray, lengths: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    CALLS.append(len(ids))
    value = (tokens == 5).sum(axis=1).astype(np.float32)
    return value, (value > 0).astype(np.float32)


def config_on(shape: tuple[int, int, int], lora: bool = False) -> TrainConfig:
    rollout = replace(CONFIG.rollout, verifier="coupled") if lora else CONFIG.rollout
    loss = LossConfig(kl_coefficient=0.1)
    return replace(CONFIG, rollout=rollout, loss=loss, microbatches=MICROBATCHES.get(shape, 1))


def fresh_state(mesh: Mesh, lora: bool = False) -> TrainState:
    """Return a state whose reference policy differs from the trained policy."""
    if lora:
        return init_train_state(adapted_params(mesh, b_scale=0.3), CONFIG, mesh, with_reference=True)
    state = state_on(mesh, with_reference=True)
    return replace(state, reference=jax.tree.map(lambda x: x * jnp.asarray(1.1, x.dtype), state.reference))


@dataclass(frozen=True)
class Stepped:
    """Result of one step on a mesh, and the text of its program."""

    mesh: Mesh
    text: str
    rollout: Rollout
    metrics: Metrics
    gradients: Params
    params: Params
    asked: tuple[int, ...]


@pytest.fixture(scope="module")
def stepped():
    done: dict[tuple[tuple[int, int, int], bool], Stepped] = {}

    def on(shape: tuple[int, int, int], lora: bool = False) -> Stepped:
        if (shape, lora) not in done:
            mesh = mesh_of(*shape)
            reward: RewardFn = host_reward(count_fives_on_the_host, mesh) if shape == (2, 2, 2) else count_fives
            step = make_train_step(POLICY, DRAFTER, reward, config_on(shape, lora), mesh)
            state, prompts = fresh_state(mesh, lora), place(make_prompts(), mesh)
            compiled = step.lower(state, prompts).compile()
            CALLS.clear()
            state, rollout, metrics = jax.block_until_ready(compiled(state, prompts))
            asked, gradients = tuple(CALLS), last_gradients(state)
            assert "ynn_fusion" not in compiled.as_text()
            done[shape, lora] = Stepped(mesh, compiled.as_text(), rollout, metrics, gradients, state.params, asked)
        return done[shape, lora]

    return on


def assert_same_rollout(rollout: Rollout, expected: Rollout) -> None:
    for name in ("tokens", "lengths", "stopped", "drafted", "accepted", "row_rounds"):
        np.testing.assert_array_equal(getattr(rollout, name), getattr(expected, name), err_msg=name)
    np.testing.assert_allclose(rollout.full, expected.full, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ADAPTED)
def test_every_mesh_has_the_same_tokens_and_gradients_of_adapters(shape, stepped) -> None:
    got, expected = stepped(shape, lora=True), stepped((1, 1, 1), lora=True)
    assert_same_rollout(got.rollout, expected.rollout)
    assert got.metrics["rollout/acceptance_length"] > 1
    assert_same_gradients(got, expected)


def test_a_mesh_drafts_and_teaches_a_block_draft_as_one_device_does() -> None:
    """Its Markov tables are split over `tensor`."""
    heads = dict(markov_rank=4, enable_confidence_head=True, confidence_head_with_markov=True)
    config = block_like(DECODER, CONFIG.rollout.draft_length, num_layers=1, **heads)
    init, drafter, rng = partial(init_block, config), make_block(config, POLICY), np.random.default_rng(3)
    values = jax.tree.map(lambda x: np.float32(0.3 * rng.standard_normal(x.shape)), abstract_params(init))
    rollouts, gradients, batch = list[Rollout](), list[Params](), ragged_batch(8, 26, samples=GROUP)
    for mesh in (mesh_of(), mesh_of(1, 2, 2)):
        params = replace(params_on(mesh), draft=jax.device_put(values, param_shardings(init, mesh)))
        generate = make_generate(POLICY, drafter, replace(CONFIG.rollout, verifier="coupled"), mesh)
        rollouts.append(generate(params, make_prompts(), seed_step(7, 0)))
        context = replace(Stages(POLICY, drafter, count_fives, CONFIG, mesh).loss_context(batch), anchors=0)
        with jax.set_mesh(mesh):
            gradients.append(host_copy(jax.jit(partial(accumulate, context))(params, batch)[0]))
    before, after = params.draft["predecessor"], params.draft["successor"]["kernel"]
    assert before.sharding.spec[0] == after.sharding.spec[1] == "tensor"
    assert_same_rollout(rollouts[1], rollouts[0])
    assert np.sum(rollouts[0].accepted) > 0
    assert relative_gap(gradients[1].draft, gradients[0].draft) < 1e-5


@pytest.mark.parametrize("shape", SHARDED)
def test_every_mesh_samples_the_same_tokens(shape, stepped) -> None:
    assert_same_rollout(stepped(shape).rollout, stepped((1, 1, 1)).rollout)
    trips = stepped(shape).rollout.loop_rounds
    assert len(trips) == batch_shards(stepped(shape).mesh) and len(np.unique(trips)) > 1
    assert stepped(shape).rollout.plain_rounds.shape == trips.shape


@pytest.mark.parametrize("shape", SHARDED)
def test_every_mesh_and_number_of_microbatches_has_the_same_gradients(shape, stepped) -> None:
    assert_same_gradients(stepped(shape), stepped((1, 1, 1)))


def assert_same_gradients(got: Stepped, expected: Stepped) -> None:
    assert relative_gap(got.gradients.policy, expected.gradients.policy) < 1e-5
    assert relative_gap(got.gradients.draft, expected.gradients.draft) < 1e-5
    assert got.metrics.keys() == expected.metrics.keys()
    for name, value in expected.metrics.items():
        np.testing.assert_allclose(got.metrics[name], value, rtol=1e-4, atol=2e-5, err_msg=name)


@pytest.mark.slow
def test_the_host_is_asked_once_per_data_shard(stepped) -> None:
    assert stepped((2, 2, 2)).asked == (8, 8, 8, 8)
    assert stepped((8, 1, 1)).asked == ()


def decode_loop(stepped: Stepped) -> tuple[Program, list, int]:
    """Return the program, all that its decode loop runs, and the number of elements of a layer's keys per device."""
    mesh, k = stepped.mesh, CONFIG.rollout.draft_length
    prompts = make_prompts()
    keys = (
        len(prompts.lengths) * GROUP // batch_shards(mesh),
        DECODER.num_kv_heads // mesh.shape["tensor"],
        prompts.tokens.shape[1] + BUDGET + k + 1,
        DECODER.head_dim,
    )
    program = Program(stepped.text)
    return program, program.loop(carries=keys, times=2 * DECODER.num_layers), int(np.prod(keys))


@pytest.mark.slow
def test_data_shards_decode_without_a_collective(stepped) -> None:
    _, loop, _ = decode_loop(stepped((8, 1, 1)))
    assert any(line.opcode == "dot" for line in loop)
    assert not collectives(loop)


@pytest.mark.parametrize(
    "shape, lora",
    [
        ((2, 2, 2), False),
        pytest.param((1, 4, 2), False, marks=pytest.mark.slow),
        pytest.param((1, 2, 2), True, marks=pytest.mark.slow),
    ],
)
def test_tensor_shards_decode_with_collectives_among_themselves_alone(shape, lora, stepped) -> None:
    """Adapters add their sums to their layers'."""
    _, loop, _ = decode_loop(stepped(shape, lora))
    used = collectives(loop)
    assert used
    assert not [line.line for line in used if not within_shard(line.line, stepped(shape, lora).mesh)]
    # Two per layer, one after the embedding and one for the logits; for the policy once, for the draft in each step.
    policy, draft = 2 * DECODER.num_layers + 2, CONFIG.rollout.draft_length * 4
    assert len(used) <= policy + draft


@pytest.mark.parametrize("shape", [(1, 1, 1), *SHARDED])
def test_no_cache_is_copied_while_decoding(shape, stepped) -> None:
    program, loop, keys = decode_loop(stepped(shape))
    assert not [line.line for line in program.copies(loop, keys)]


@pytest.mark.slow
def test_no_loop_of_rounds_among_phases_leaves_its_shard_or_copies_a_cache() -> None:
    """With waiting sequences, growing windows and chosen draft lengths, each phase has two loops."""
    mesh = mesh_of(2, 2, 2)
    options = replace(CONFIG.rollout, draft_lengths=(0, 2), phases=((4, 20), (4, 26), (2, 26)))
    prompts, params = place(make_prompts(), mesh), params_on(mesh)
    phases = lay_out(options, len(prompts.lengths) * GROUP // batch_shards(mesh), prompts.tokens.shape[1])
    assert phases == options.phases
    with jax.set_mesh(mesh):
        generate = jax.jit(per_shard(speculative_rollout, POLICY, DRAFTER, options, mesh))
        lowered = generate.lower(params, prompts, seed_step(7, 0), jnp.zeros(len(phases), jnp.int32))
        program = Program(lowered.compile().as_text())
    heads = DECODER.num_kv_heads // mesh.shape["tensor"]
    for slots, window in phases:
        keys = slots, heads, window + options.slack, DECODER.head_dim
        loops = program.loops(carries=keys, times=2 * DECODER.num_layers)
        assert len(loops) == len(options.draft_lengths)
        for loop in loops:
            assert any(line.opcode == "dot" for line in loop)
            assert not [line.line for line in collectives(loop) if not within_shard(line.line, mesh)]
            assert not [line.line for line in program.copies(loop, int(np.prod(keys)))]


@pytest.mark.slow
@pytest.mark.parametrize("shape, lora", [((2, 2, 2), False), ((1, 2, 2), True)])
def test_the_probe_does_the_same_step_and_times_its_stages(shape, lora, stepped) -> None:
    fused, mesh = stepped(shape, lora), stepped(shape, lora).mesh
    probe = ProbeStep(Stages(POLICY, DRAFTER, count_fives, config_on(shape, lora), mesh))
    start = fresh_state(mesh, lora)
    state, rollout, metrics = probe(start, make_prompts())
    assert all(x.is_deleted() for x in jax.tree.leaves(start))
    assert_same_rollout(rollout, fused.rollout)
    assert relative_gap(last_gradients(state).policy, fused.gradients.policy) < 1e-6
    assert relative_gap(last_gradients(state).draft, fused.gradients.draft) < 1e-6
    assert relative_gap(state.params, fused.params) < 1e-6
    assert state.step == 1

    times = {name for name in metrics if name.startswith(("time/", "perf/"))}
    stages = {f"time/{name}" for name in ("prepare", "generation", "reward", "logprob", "train", "step")}
    assert times == stages | {"perf/generation_tokens_per_s", "perf/speedup_vs_autoregressive"}
    assert all(metrics[name] > 0 for name in times)
    speed = int(rollout.lengths.sum()) / metrics["time/generation"]
    np.testing.assert_allclose(metrics["perf/generation_tokens_per_s"], speed, rtol=1e-5)
    assert metrics.keys() - times == fused.metrics.keys()
    for name, value in fused.metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, atol=2e-5, err_msg=name)

    prompts = make_prompts()
    with jax.no_tracing():
        state, _, _ = probe(state, prompts)
    assert state.step == 2

"""A policy with a mixture of experts: rollouts, their routes, and training that replays routes."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from models.config import ExpertsConfig
from models.decoder import init_decoder, make_policy
from models.drafts.eagle3 import Eagle3Config, init_eagle3, make_eagle3
from models.drafts.mtp import init_mtp, make_mtp, mtp_config
from models.params import Init, abstract_params, param_shardings
from specjax.drafters import Drafter, NoDrafter
from specjax.keys import seed_step
from specjax.parallel.mesh import MeshConfig, batch_shards, make_mesh
from specjax.rollout.generate import per_shard, place
from specjax.rollout.make_generate import make_generate
from specjax.rollout.speculative import speculative_rollout
from specjax.sampling import SamplingLaw
from specjax.testing.hlo import Program, collectives, within_shard
from specjax.testing.lossless import assert_lossless
from specjax.train.batch import TrainBatch, join_completions
from specjax.train.config import TrainConfig
from specjax.train.gradients import accumulate
from specjax.train.loss import LossConfig
from specjax.train.loss_context import LossContext
from specjax.train.state import init_train_state
from specjax.train.train_step import make_train_step
from specjax.types import Params, PyTree, Rollout
from tests.refusals import refuses
from tests.specjax import training
from tests.specjax.training import BUDGET, CONFIG, DECODER, HEAD, count_fives, make_prompts, ragged_batch, relative_gap

EXPERTS = ExpertsConfig(num_experts=8, active=2, intermediate_size=16, layers=(1,))
DECODER_MOE = replace(DECODER, experts=EXPERTS)
POLICY = make_policy(DECODER_MOE)
EAGLE3, MTP = make_eagle3(HEAD, POLICY), make_mtp(mtp_config(DECODER_MOE, "mimo"), POLICY)
COUPLED = replace(CONFIG.rollout, verifier="coupled")
ONE, EIGHT = MeshConfig(), MeshConfig(data=2, expert=2, tensor=2)
RUN = seed_step(7, 0)
DRAFTS: dict[str, tuple[Drafter, Init | None]] = {
    "none": (NoDrafter(), None),
    "eagle3": (EAGLE3, partial(init_eagle3, HEAD)),
    "mtp": (MTP, partial(init_mtp, mtp_config(DECODER_MOE, "mimo"))),
}


def filled(init: Init | None, mesh: Mesh, scale: float = 0.3) -> PyTree:
    """Return parameters with the same random numbers on every mesh."""
    rng = np.random.default_rng(0)

    def fill(x: jax.ShapeDtypeStruct) -> np.ndarray:
        return ((1.0 if x.ndim == 1 else 0.0) + scale * rng.standard_normal(x.shape)).astype(x.dtype)

    return (
        {} if init is None else jax.device_put(jax.tree.map(fill, abstract_params(init)), param_shardings(init, mesh))
    )


def params_on(config: MeshConfig, draft: str = "eagle3") -> Params:
    mesh = make_mesh(config)
    return Params(filled(partial(init_decoder, DECODER_MOE), mesh), filled(DRAFTS[draft][1], mesh))


def rollout_on(config: MeshConfig, draft: str, **options) -> Rollout:
    rollout = replace(COUPLED, **({"draft_length": 0} if draft == "none" else {}), **options)
    generate = make_generate(POLICY, DRAFTS[draft][0], rollout, make_mesh(config))
    return generate(params_on(config, draft), make_prompts(), RUN)


@pytest.fixture(scope="module")
def plain() -> Rollout:
    return rollout_on(ONE, "none")


@pytest.mark.parametrize(
    "mesh, draft, options",
    [
        (MeshConfig(expert=4), "mtp", {}),
        (EIGHT, "eagle3", {}),
        # Sequences wait, and windows are shorter than the longest row.
        pytest.param(ONE, "eagle3", dict(phases=((8, 20), (4, 26))), marks=pytest.mark.slow),
    ],
    ids=["4 experts, mtp", "2 experts, data, tensor", "slots"],
)
def test_coupled_tokens_and_routes_do_not_depend_on_mesh_or_draft(mesh, draft: str, options: dict, plain: Rollout):
    rollout = rollout_on(mesh, draft, **options)
    for name in ("tokens", "lengths", "routes"):
        np.testing.assert_array_equal(getattr(rollout, name), getattr(plain, name), err_msg=name)
    assert rollout.accepted is not None and jnp.sum(rollout.accepted) > 0


def test_the_routes_of_a_rollout_equal_those_of_a_forward(plain: Rollout):
    prompts = make_prompts()
    rows = join_completions(prompts, plain, jnp.zeros(len(plain.lengths)))
    assert rows.routes is not None and rows.routes.dtype == "uint8"
    forward = jax.jit(POLICY.apply)(params_on(ONE).policy, rows.tokens, jnp.zeros(len(rows.tokens), jnp.int32))
    seen = np.arange(rows.tokens.shape[1])[None] < np.asarray(rows.lengths)[:, None] - 1
    np.testing.assert_array_equal(np.asarray(rows.routes)[seen], np.asarray(forward.routing.chosen)[seen])
    assert not np.asarray(rows.routes)[~seen].any() and seen.sum() > 100
    assert len(np.unique(np.asarray(rows.routes)[seen])) == EXPERTS.num_experts


@pytest.mark.slow
def test_decoding_adds_the_parts_of_the_experts_once_a_layer_and_gathers_no_weights():
    mesh, options = make_mesh(EIGHT), replace(COUPLED, draft_length=0)
    prompts = place(make_prompts(), mesh)
    with jax.set_mesh(mesh):
        generate = jax.jit(per_shard(speculative_rollout, POLICY, NoDrafter(), options, mesh))
        program = Program(generate.lower(params_on(EIGHT, "none"), prompts, RUN, None).compile().as_text())
    rows, width = len(prompts.lengths) * options.group_size // batch_shards(mesh), prompts.tokens.shape[1]
    keys = rows, DECODER.num_kv_heads // 2, width + BUDGET + options.slack, DECODER.head_dim
    used = collectives(program.loop(carries=keys, times=2 * DECODER.num_layers))
    assert not [line.line for line in used if not within_shard(line.line, mesh)]
    # As with a dense MLP: two sums per layer, one after the embedding, and the logits of the vocabulary.
    logits = rows, 1, DECODER.vocab_size
    gathers = [line for line in used if "all-gather" in line.opcode]
    assert not [line.line for line in gathers if logits not in line.arrays]
    assert 0 < len(used) - len(gathers) <= 2 * DECODER.num_layers + 1


LOSS = LossConfig(router_aux_loss_coef=0.5, routing="replay")
TRAIN = replace(CONFIG, rollout=COUPLED, loss=LOSS, microbatches=2)


def step_on(config: MeshConfig, train: TrainConfig) -> tuple[Params, Rollout, dict[str, jax.Array]]:
    mesh = make_mesh(config)
    step = make_train_step(POLICY, EAGLE3, count_fives, train, mesh)
    state, rollout, metrics = step(init_train_state(params_on(config), train, mesh), make_prompts())
    return training.last_gradients(state), rollout, metrics


@pytest.mark.slow
def test_a_step_is_the_same_on_every_mesh_and_replay_changes_nothing_in_float32():
    gradients, rollout, metrics = step_on(ONE, replace(TRAIN, loss=replace(LOSS, routing="recompute"), microbatches=1))
    assert metrics["router/rerouted"] == 0 and metrics["router/load_max"] > 1
    assert metrics["router/unused"] == 0
    assert metrics["router/balance_loss"] > 1
    elsewhere, again, replayed = step_on(EIGHT, TRAIN)
    np.testing.assert_array_equal(rollout.tokens, again.tokens)
    assert relative_gap(elsewhere.policy, gradients.policy) < 1e-5
    assert relative_gap(elsewhere.draft, gradients.draft) < 1e-5
    for name, value in metrics.items():
        np.testing.assert_allclose(replayed[name], value, rtol=1e-4, atol=2e-5, err_msg=name)
    assert rollout.routes is not None and rollout.batch is not None and rollout.batch.routes is None


def batch_with_routes() -> TrainBatch:
    batch = ragged_batch(8, 14)
    routes = np.random.default_rng(5).permuted(np.tile(np.arange(8), (8, 14, 1, 1)), axis=-1)[..., :2]
    return replace(batch, routes=jnp.asarray(routes.astype(np.uint8)))


def test_training_uses_exactly_the_replayed_routes():
    """Under random routes, log-probs are right, and exactly the experts in the routes get a gradient."""
    batch, params = batch_with_routes(), params_on(ONE)
    context = LossContext(POLICY, NoDrafter(), SamplingLaw(), LOSS)
    output = jax.jit(lambda params: context.forward(params, batch))(params.policy)
    given = jax.jit(POLICY.apply)(params.policy, batch.tokens, jnp.zeros(8, jnp.int32), routes=batch.routes)
    np.testing.assert_array_equal(output.hidden, given.hidden)
    one = replace(batch, routes=jnp.full_like(batch.routes, 3).at[..., 1].set(5))
    gradient, sums = jax.jit(partial(accumulate, context))(Params(params.policy, {}), one)
    norms = jnp.linalg.norm(gradient.policy["layer_1"]["mlp"]["experts"]["up"], axis=(1, 2))
    assert set(np.flatnonzero(norms).tolist()) == {3, 5}
    assert sums.policy.router is not None
    compared, rerouted = float(sums.policy.router.compared), float(sums.policy.router.rerouted)
    real = np.asarray(batch.lengths)[np.asarray(batch.counted)] - 1
    assert compared == real.sum() and 0.5 * compared < rerouted <= compared


@pytest.mark.slow
def test_the_balance_loss_per_sequence_does_not_depend_on_microbatches():
    batch, params = ragged_batch(8, 14), Params(params_on(ONE).policy, {})
    loss = LossConfig(router_aux_loss_coef=1.0)
    still = replace(batch, advantage=jnp.zeros_like(batch.advantage))
    found = []
    for parts, ladder in ((1, ()), (4, (8, 11))):
        context = LossContext(POLICY, NoDrafter(), SamplingLaw(), loss, microbatches=parts, ladder=ladder)
        found.append(jax.jit(partial(accumulate, context))(params, still))
    (one, sums), (several, parts) = found
    assert relative_gap(several.policy, one.policy) < 1e-5
    assert jnp.linalg.norm(one.policy["layer_1"]["mlp"]["router"]) > 1e-3
    routing = jax.jit(POLICY.apply)(params.policy, batch.tokens, jnp.zeros(8, jnp.int32)).routing
    chosen, probs = np.asarray(routing.chosen)[:, :, 0], np.asarray(routing.probs, np.float64)[:, :, 0]
    rows = [(row, n) for row, n in enumerate(np.asarray(batch.lengths)) if batch.counted[row]]
    load = np.array([np.bincount(chosen[row, :n].ravel(), minlength=8) * 4 / n for row, n in rows])
    mean = np.array([probs[row, :n].mean(axis=0) for row, n in rows])
    for each in (sums, parts):
        assert each.policy.router is not None
        np.testing.assert_allclose(each.policy.router.balance, np.mean(np.sum(load * mean, axis=1)), rtol=1e-5)
        np.testing.assert_allclose(each.policy.router.load[0], load.mean(axis=0), rtol=1e-5)


@pytest.mark.parametrize("options", [dict(routing="replay"), dict(router_aux_loss_coef=0.1)])
def test_options_of_a_mixture_need_a_mixture(options: dict):
    policy, drafter = training.networks()
    (name, value), *_ = options.items()
    with refuses(f"loss.{name} = {value}: must be ..."):
        make_train_step(
            policy, drafter, count_fives, replace(CONFIG, loss=LossConfig(**options)), training.mesh_of(1, 1, 1)
        )


def test_replay_needs_routes():
    def forgetful(*args) -> Rollout:
        tokens = jnp.ones((32, BUDGET), jnp.int32)
        return Rollout(tokens=tokens, lengths=jnp.full(32, 3))

    step = make_train_step(POLICY, EAGLE3, count_fives, TRAIN, make_mesh(ONE), forgetful)
    with refuses("loss.routing = replay: the rollout has no routes"):
        step(init_train_state(params_on(ONE), TRAIN, make_mesh(ONE)), make_prompts())


SMALL = dict(hidden_size=8, intermediate_size=8, num_heads=2, num_kv_heads=1, head_dim=4, vocab_size=4)


@pytest.mark.slow
@pytest.mark.parametrize("verifier, draft", [("rejection", "mtp"), ("block", "eagle3")])
def test_rollouts_of_a_mixture_follow_its_law(verifier: str, draft: str):
    experts = ExpertsConfig(num_experts=4, active=2, intermediate_size=8)
    decoder = replace(DECODER, **SMALL, num_layers=1, feature_layers=(0,), experts=experts)
    policy, mesh = make_policy(decoder), make_mesh(ONE)
    if draft == "mtp":
        head = mtp_config(decoder, "mimo")
        drafter, init = make_mtp(head, policy), partial(init_mtp, head)
    else:
        head = Eagle3Config(**SMALL, feature_size=8, draft_vocab_size=4)
        drafter, init = make_eagle3(head, policy), partial(init_eagle3, head)
    params = Params(filled(partial(init_decoder, decoder), mesh, scale=1.0), filled(init, mesh))
    # 64 rows have few enough tokens for the implementation of experts that rollouts use.
    config = replace(CONFIG.rollout, group_size=64, max_new_tokens=4, stop_tokens=(3,), verifier=verifier)
    assert_lossless(policy, drafter, params, config, draws=2**15, total_variation=0.05)

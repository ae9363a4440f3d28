"""A prompt that passes the policy once for its group gives the gradients of one that passes once for each sample."""

from dataclasses import replace
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from models.config import DecoderConfig, ExpertsConfig
from models.decoder import init_decoder, make_policy
from models.params import abstract_params, param_shardings
from models.rope import Llama3Scaling
from specjax import kernels
from specjax.kernels import cudnn, plain
from specjax.parallel.mesh import BATCH_AXES
from specjax.sampling import SamplingLaw
from specjax.shared_prompts import SharedPrompts, samples_that_share, shared_prompts
from specjax.testing.hlo import Program, collectives
from specjax.train.batch import TrainBatch, join, split
from specjax.train.gradients import accumulate, log_probs_of
from specjax.train.loss import LossConfig
from specjax.train.loss_context import LossContext
from specjax.train.loss_sums import Sums
from specjax.train.stages import Stages
from specjax.train.updates import UpdateConfig
from specjax.types import Params
from tests.specjax.training import BUDGET as BUDGET_OF_STEPS
from tests.specjax.training import (
    CONFIG,
    DECODER,
    GROUP,
    SHAPE,
    count_fives,
    mesh_of,
    networks,
    params_on,
    ragged_batch,
    relative_gap,
)
from tests.whole_rows import attend_dense

ROWS, PROMPT, BUDGET, EMPTY = 16, 6, 10, 2
DRAFTER = networks()[1]
EXPERTS = ExpertsConfig(num_experts=4, active=2, intermediate_size=16)
FAMILIES = {
    "Qwen3": DECODER,
    "Llama": DecoderConfig(**SHAPE, num_layers=1, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 4)),
    "Qwen2": DecoderConfig(**SHAPE, num_layers=1, qkv_bias=True, tie_embeddings=True),
    "Mistral": DecoderConfig(**SHAPE, num_layers=2, sliding_window=5, sliding_layers=(1,)),
    "mixture": DecoderConfig(**SHAPE, num_layers=1, qk_norm=True, experts=EXPERTS),
}
ONE = mesh_of()
UNPACK = SharedPrompts.unpack


def shared_batch(routes: bool = False) -> TrainBatch:
    """Return groups with prompts of 1 to 4 tokens, with a completion of every length; one is empty."""
    batch = ragged_batch(ROWS, PROMPT + BUDGET, samples=GROUP)
    rng = np.random.default_rng(1)
    drawn = {"routes": jnp.asarray(rng.integers(0, 4, (ROWS, PROMPT + BUDGET, 1, 2)), jnp.uint8)} if routes else {}
    if routes:
        # The prompt's routes are those of one prefill.
        of_prompt = jnp.repeat(drawn["routes"][::GROUP], GROUP, axis=0)
        before = jnp.cumsum(batch.completion, axis=1) == 0
        drawn["routes"] = jnp.where(before[..., None, None], of_prompt, drawn["routes"])
    reference = jnp.asarray(rng.normal(-3, 0.5, batch.completion.shape), jnp.float32)
    return replace(batch, completion=batch.completion.at[EMPTY].set(False), reference=reference, **drawn)


def params_of(decoder: DecoderConfig, mesh: jax.sharding.Mesh) -> Params:
    """Return parameters of the policy, and of a draft if the policy has features for it."""
    if decoder == DECODER:
        return params_on(mesh)
    rng, init = np.random.default_rng(0), partial(init_decoder, decoder)
    values = jax.tree.map(lambda x: (x.ndim == 1) + 0.3 * rng.standard_normal(x.shape), abstract_params(init))
    values = jax.tree.map(lambda x: np.asarray(x, np.float32), values)
    return Params(jax.device_put(values, param_shardings(init, mesh)), {})


def lowered(family: str, samples: int, parts: int = 1, mesh: Any = ONE, **loss: Any) -> tuple[jax.stages.Lowered, Any]:
    """Lower the gradients and the log-probs of another policy, with prompts that are shared by so many rows."""
    decoder, routes = FAMILIES[family], loss.get("routing") == "replay"
    config = LossConfig(kl_coefficient=0.3, router_aux_loss_coef=0.1 * (family == "mixture"), **loss)
    context = LossContext(make_policy(decoder), DRAFTER, SamplingLaw(temperature=0.7), config, microbatches=parts)
    context = replace(context, budget=BUDGET, samples=samples)

    def run(params: Params, batch: TrainBatch) -> tuple[Params, Sums, jax.Array]:
        gradients, sums = accumulate(context, params, batch)
        return gradients, sums, log_probs_of(context, params.policy, batch, mesh)

    args = params_of(decoder, mesh), jax.device_put(shared_batch(routes), NamedSharding(mesh, P(BATCH_AXES)))
    with jax.set_mesh(mesh):
        return jax.jit(run).lower(*args), args


def results(*args: Any, **loss: Any) -> tuple[Params, Sums, jax.Array]:
    program, given = lowered(*args, **loss)
    return program.compile()(*given)


@pytest.fixture(scope="module")
def separate() -> tuple[Params, Sums, jax.Array]:
    """Return the results of separate rows."""
    return results("Qwen3", 1)


def assert_equal(found: tuple, expected: tuple) -> None:
    assert relative_gap(found[0].policy, expected[0].policy) < 1e-5
    if jax.tree.leaves(expected[0].draft):
        assert relative_gap(found[0].draft, expected[0].draft) < 1e-5
    chex.assert_trees_all_close(found[1:], expected[1:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "family, loss",
    [
        ("Qwen3", {"aggregate": "sequence"}),
        ("Qwen2", {"aggregate": "budget"}),
        ("Llama", {"ratio": "sequence", "aggregate": "sequence"}),
        ("Mistral", {"ratio": "sequence"}),
        ("mixture", {}),
        ("mixture", {"routing": "replay"}),
    ],
)
def test_gradients_sums_and_log_probs_are_those_of_separate_rows(family: str, loss: dict[str, Any]) -> None:
    assert_equal(results(family, GROUP, **loss), results(family, 1, **loss))


@pytest.mark.parametrize("samples, parts, shape", [(2, 4, (1, 1, 1)), (4, 2, (2, 1, 1)), (2, 1, (2, 2, 2))])
def test_neither_parts_of_a_group_nor_the_mesh_change_them(
    samples: int, parts: int, shape: tuple[int, ...], separate: Any
) -> None:
    """Rows stay on their shard: over data alone the program only sums."""
    program, args = lowered("Qwen3", samples, parts, mesh_of(*shape))
    compiled = program.compile()
    assert_equal(compiled(*args), separate)
    if shape == (2, 1, 1):
        lines = [line for lines in Program(compiled.as_text() or "").computations.values() for line in lines]
        assert {line.opcode.removesuffix("-start") for line in collectives(lines)} == {"all-reduce"}


def other_sample(q: jax.Array, k: jax.Array, v: jax.Array, shared: SharedPrompts, window: int | None = None):
    """Attend in packed rows as if they were plain ones: a completion sees the one before."""
    return plain.attend_rows(q, k, v, window=window)


def prompt_of_one(shared: SharedPrompts, packed: jax.Array) -> jax.Array:
    """Unpack, but give the gradient of the prompt to one sample only."""
    prompts = jnp.repeat(packed[:, : shared.prompt], shared.samples, axis=0)
    first = (jnp.arange(len(prompts)) % shared.samples == 0).reshape(-1, *(1,) * (packed.ndim - 1))
    prompts = jnp.where(first, prompts, jax.lax.stop_gradient(prompts))
    rows = jnp.pad(prompts, ((0, 0), (0, shared.budget), *((0, 0),) * (packed.ndim - 2)))
    put = jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice_in_dim(row, new, at, axis=0))
    return put(rows, shared.completions(packed), shared.starts)


def first_sample(shared: SharedPrompts, packed: jax.Array) -> jax.Array:
    """Unpack, but give each sample the features of the first. Other arrays are unpacked right."""
    rows = UNPACK(shared, packed)
    wide = packed.ndim == 3 and packed.shape[-1] == DECODER.hidden_size * len(DECODER.feature_layers)
    return jnp.repeat(rows[:: shared.samples], shared.samples, axis=0) if wide else rows


def from_zero(shared: SharedPrompts) -> jax.Array:
    """Number the tokens of each completion from 0, not from the end of its prompt."""
    row = jnp.concatenate([jnp.arange(shared.prompt), jnp.tile(jnp.arange(shared.budget), shared.samples)])
    return jnp.tile(row[None], (len(shared.starts) // shared.samples, 1))


def one_late(completion: jax.Array, budget: int, samples: int) -> SharedPrompts:
    """Lose the first token of each completion."""
    shared = shared_prompts(completion, budget, samples)
    return replace(shared, starts=shared.starts + 1)


@pytest.mark.parametrize(
    "place, fault",
    [
        ("specjax.kernels.plain.attend_packed", other_sample),
        ("specjax.shared_prompts.SharedPrompts.unpack", prompt_of_one),
        ("specjax.shared_prompts.SharedPrompts.unpack", first_sample),
        ("specjax.shared_prompts.SharedPrompts.positions", property(from_zero)),
        ("specjax.train.loss_context.shared_prompts", one_late),
    ],
    ids=["sees another sample", "prompt's gradient once", "features", "positions from 0", "border"],
)
def test_a_planted_fault_is_found(place: str, fault: Any, separate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, fault)
    found, network = results("Qwen3", GROUP)[0], "draft" if fault is first_sample else "policy"
    assert relative_gap(getattr(found, network), getattr(separate[0], network)) > 1e-3


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("attend", [plain.attend_packed, cudnn.attend_packed])
def test_attention_is_that_of_each_row_in_float64(attend: Any, window: int | None) -> None:
    """Outputs and gradients equal those of a dense reference, row by row."""
    starts = jnp.asarray([3, 3, 1, 1], jnp.int32)
    shared, width = SharedPrompts(starts, prompt=3, budget=4, samples=2), 7
    q, key = np.arange(width)[:, None], np.arange(width)[None]
    mask = (key <= q) & (window is None or key > q - window)
    random = np.random.default_rng(0)
    args = random.normal(size=(2, 11, 4, 8)), *random.normal(size=(2, 2, 11, 2, 8))
    weight = random.normal(size=(4, width, 4, 8))
    counts = np.arange(width)[None] < np.asarray(starts)[:, None] + shared.budget

    def total(function: Any, *args: jax.Array) -> jax.Array:
        y = jnp.where(jnp.asarray(counts)[..., None, None], function(*args), 0.0)
        return jnp.sum(jnp.sin(y) * jnp.asarray(weight))

    def found(*args: jax.Array) -> jax.Array:
        return shared.unpack(attend(*args, shared, window))

    def expected(*args: jax.Array) -> jax.Array:
        return attend_dense(*(shared.unpack(x) for x in args), mask)

    with jax.enable_x64(True):
        given = [jnp.asarray(x) for x in args]
        mine, reference = (
            jax.jit(jax.value_and_grad(partial(total, function), (0, 1, 2)))(*given) for function in (found, expected)
        )
    for x, y in zip(jax.tree.leaves(mine), jax.tree.leaves(reference), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-12)


def test_packed_rows_hold_each_prompt_once_and_unpack_to_the_rows() -> None:
    batch = shared_batch()
    completion = batch.completion.at[EMPTY].set(jnp.arange(PROMPT + BUDGET) == int(jnp.argmax(batch.completion[0])))
    shared, tokens = shared_prompts(completion, BUDGET, GROUP), np.asarray(batch.tokens)
    starts, packed = np.asarray(shared.starts), np.asarray(shared.pack(batch.tokens))
    assert packed.shape == shared.positions.shape == (ROWS // GROUP, PROMPT + GROUP * BUDGET)
    for row in range(ROWS):
        start, (group, sample) = starts[row], divmod(row, GROUP)
        own = PROMPT + sample * BUDGET + np.arange(BUDGET)
        np.testing.assert_array_equal(packed[group, own], tokens[row, start : start + BUDGET])
        np.testing.assert_array_equal(shared.positions[group, own], start + np.arange(BUDGET))
        np.testing.assert_array_equal(packed[group, :start], tokens[row, :start])
        np.testing.assert_array_equal(shared.unpack(packed)[row, : start + BUDGET], tokens[row, : start + BUDGET])


def test_parts_take_whole_units_of_rows() -> None:
    rows = jnp.arange(24)
    parts = split(rows, 3, 4)
    np.testing.assert_array_equal(parts, [[*range(0, 4), *range(12, 16)], [*range(4, 8), *range(16, 20)],
                                          [*range(8, 12), *range(20, 24)]])  # fmt: skip
    np.testing.assert_array_equal(join(parts, 4), rows)
    np.testing.assert_array_equal(split(rows, 3)[1], np.arange(1, 24, 3))


@pytest.mark.parametrize(
    "changes, rows, samples",
    [
        ({}, 16, 4),
        ({}, 6, 2),
        ({}, 3, 1),
        ({"ladder": (8,)}, 16, 1),
        ({"updates": UpdateConfig(minibatches=2)}, 16, 2),
        ({"updates": UpdateConfig(minibatches=3)}, 15, 1),
    ],
)
def test_samples_share_where_they_are_neighbours(changes: dict[str, Any], rows: int, samples: int) -> None:
    """rows: of a microbatch, four samples a prompt. A minibatch takes every n-th row, and a ladder sorts them."""
    config, policy = replace(CONFIG, **changes), networks()[0]
    assert config.sharing(policy, rows, PROMPT) == samples
    assert config.sharing(replace(policy, packs=False), rows, PROMPT) == 1
    groups = jnp.repeat(jnp.arange(60), GROUP)
    for part in split(groups, config.updates.minibatches):
        units = part.reshape(-1, samples)
        assert jnp.all(units == units[:, :1])


def test_a_step_shares_prompts() -> None:
    stages, batch = Stages(*networks(), count_fives, CONFIG, ONE), ragged_batch(8, 6 + BUDGET_OF_STEPS, samples=GROUP)
    assert stages.loss_context(batch).samples == GROUP


def test_prompts_are_shared_where_that_saves_tokens() -> None:
    assert samples_that_share(1024, 1024, 8) == 8 and samples_that_share(1024, 1024, 1) == 1
    assert samples_that_share(1, 1000, 8) == 1
    assert kernels.attend_packed is plain.attend_packed

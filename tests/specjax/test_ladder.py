"""Rows in windows and logits in chunks: losses and gradients do not change, and programs hold no more than needed."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from models.decoder import init_decoder, make_policy
from models.drafts.eagle3 import init_eagle3, make_eagle3
from models.drafts.mtp import init_mtp, make_mtp, mtp_config
from models.params import init_params
from specjax.chunks import by_position
from specjax.drafters import Drafter, ModelDrafter, NGramDrafter
from specjax.log_probs import teacher_forced
from specjax.parallel.mesh import BATCH_AXES, batch_shards
from specjax.rollout.speculative import speculative_rollout
from specjax.sampling import SamplingLaw
from specjax.testing.hlo import Program, collectives
from specjax.train.batch import TrainBatch, split
from specjax.train.gradients import accumulate, log_probs_of
from specjax.train.ladder import in_window, rung, sort_rows, windows
from specjax.train.loss import LossConfig
from specjax.train.loss_context import LossContext
from specjax.train.loss_sums import Sums
from specjax.train.train_step import make_train_step
from specjax.types import Params, Policy, PolicyOutput, Prompts, PyTree, Rollout
from tests.specjax import training
from tests.specjax.training import BUDGET, CONFIG, DECODER, GROUP, count_fives, make_prompts, mesh_of, relative_gap

# No other dimension equals VOCAB or DRAFT_VOCAB, and no window is a multiple of the chunk.
ROWS, LENGTH, LADDER, VOCAB, DRAFT_VOCAB, CHUNK = 32, 24, (3, 22), 38, 34, 5
FAILED, EMPTY = 17, 9
LAW = SamplingLaw(temperature=0.7)
LOSS = LossConfig(importance_cap=1.5, kl_coefficient=0.3)
SHAPE = replace(DECODER, vocab_size=VOCAB, num_layers=1, feature_layers=(0,))
HEAD = replace(training.HEAD, vocab_size=VOCAB, draft_vocab_size=DRAFT_VOCAB, feature_size=16)
POLICY = make_policy(SHAPE)
IDS = np.sort(np.random.default_rng(0).permutation(VOCAB)[:DRAFT_VOCAB]).astype(np.int32)
DRAFTER = make_eagle3(HEAD, POLICY, IDS, unroll=2)
ONE = mesh_of(1, 1, 1)

Gradients = tuple[Params, Sums]


def long_tailed() -> TrainBatch:
    """Return rows of long-tailed lengths. Half fit the first bucket, a few fill the second.

    One row has no completion. The longest one was not scored.
    """
    rng = np.random.default_rng(3)
    start = np.resize([1, 2], ROWS)
    end = rng.permuted(np.stack([np.full(8, 2), np.full(8, 3), *rng.integers(4, 9, (2, 8))], axis=1), axis=1).ravel()
    start, end = np.minimum(start, end - 1), np.where(np.isin(np.arange(ROWS), (1, 17, 30)), LADDER[1], end)
    end[EMPTY] = start[EMPTY]
    column = np.arange(LENGTH)[None]
    tokens = np.where(column < end[:, None], rng.integers(0, VOCAB, (ROWS, LENGTH)), 0)
    return TrainBatch(
        tokens=jnp.array(tokens, jnp.int32),
        completion=jnp.array((column >= start[:, None]) & (column < end[:, None])),
        reward=jnp.zeros(ROWS),
        counted=jnp.arange(ROWS) != FAILED,
        mu=jnp.array(-3 * rng.random((ROWS, LENGTH)), jnp.float32),
        advantage=jnp.array(rng.normal(size=(ROWS, LENGTH)), jnp.float32),
    )


def lengths_of(batch: TrainBatch) -> np.ndarray:
    return np.array([max(np.flatnonzero(row), default=-1) + 1 for row in np.asarray(batch.completion)])


def program(chunk: int, ladder: tuple[int, ...], parts: int, *shape: int) -> tuple[Gradients, str]:
    """Return both gradients of the batch and its sums, with log-probs of another policy, and the program's text."""
    mesh = mesh_of(*shape)
    context = LossContext(POLICY, DRAFTER, LAW, LOSS, microbatches=parts, ladder=ladder, logit_chunk=chunk)

    def run(params: Params, batch: TrainBatch) -> Gradients:
        if ladder:
            batch = sort_rows(batch, mesh, parts)
        frozen = jax.tree.map(lambda x: x * jnp.asarray(1.1, x.dtype), params.policy)
        reference = log_probs_of(replace(context, law=SamplingLaw()), frozen, batch, mesh)
        return accumulate(context, params, replace(batch, reference=reference))

    inits = partial(init_decoder, SHAPE), partial(init_eagle3, HEAD)
    params = Params(*(init_params(init, jax.random.key(i), mesh) for i, init in enumerate(inits)))
    batch = jax.device_put(long_tailed(), NamedSharding(mesh, P(BATCH_AXES)))
    with jax.set_mesh(mesh):
        compiled = jax.jit(run).lower(params, batch).compile()
        return compiled(params, batch), compiled.as_text() or ""


@pytest.fixture(scope="module")
def whole() -> tuple[Gradients, str]:
    return program(0, (), 1, 1)


def largest_positions(text: str) -> int:
    """Return the largest number of positions for which an array of the program holds one number per token."""
    positions = [
        int(np.prod(dims)) // size
        for lines in Program(text).computations.values()
        for line in lines
        for dims in line.arrays
        for size in (VOCAB, DRAFT_VOCAB)
        if size in dims
    ]
    return max(positions)


@pytest.mark.parametrize(
    "chunk, ladder, parts, shape, close",
    [
        # Chunks change the order of summation in a weight's gradient.
        (CHUNK, (), 2, (1, 1, 1), 1e-6),
        (0, LADDER, 4, (1, 1, 1), 1e-5),
        pytest.param(CHUNK, LADDER, 2, (1, 1, 1), 1e-6, marks=pytest.mark.slow),
        pytest.param(0, LADDER, 2, (8, 1, 1), 1e-5, marks=pytest.mark.slow),
        pytest.param(0, LADDER, 4, (2, 2, 2), 1e-5, marks=pytest.mark.slow),
        # The vocabulary is split over the tensor axis.
        pytest.param(CHUNK, (), 1, (2, 1, 2), 1e-5, marks=pytest.mark.slow),
    ],
)
def test_gradients_and_sums_are_those_of_padded_rows_and_all_logits(chunk, ladder, parts, shape, close, whole) -> None:
    """With chunks, the program holds no logits of whole rows."""
    (gradients, sums), text = program(chunk, ladder, parts, *shape)
    assert relative_gap(gradients.policy, whole[0][0].policy) < close
    assert relative_gap(gradients.draft, whole[0][0].draft) < close
    chex.assert_trees_all_close(sums, whole[0][1], rtol=1e-5, atol=1e-6)
    if chunk and shape == (1, 1, 1):
        # A weight has one number per token and feature.
        assert largest_positions(text) <= max(ROWS // parts * CHUNK, SHAPE.hidden_size)
        assert largest_positions(whole[1]) >= ROWS // parts * (LENGTH - 1)
    if shape == (8, 1, 1):
        # The program only sums over shards: it moves no row, loss or log-prob from one shard to another.
        lines = [line for lines in Program(text).computations.values() for line in lines]
        assert {line.opcode.removesuffix("-start") for line in collectives(lines)} == {"all-reduce"}


@pytest.mark.parametrize(
    "lengths, window", [((0,), 3), ((3, 1), 3), ((2, 4), 5), ((5, 5), 5), ((6, 2), 12), ((13,), 24), ((24, 1), 24)]
)
def test_the_window_is_the_smallest_that_fits(lengths, window) -> None:
    choices = (3, 5, 12, 24)
    assert choices[int(rung(jnp.array(lengths), choices))] == window


def test_the_full_length_is_always_the_last_rung() -> None:
    assert windows((3, 5, 12), 24) == (3, 5, 12, 24) and windows((), 9) == (9,) and windows((4, 9, 20), 9) == (4, 9)
    assert int(rung(jnp.array([9, 3]), (9,))) == 0


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2)])
def test_every_shard_sorts_its_own_rows(shape) -> None:
    mesh, parts = mesh_of(*shape), 4
    rows = NamedSharding(mesh, P(BATCH_AXES))
    batch = long_tailed()
    batch = jax.device_put(replace(batch, reward=jnp.arange(ROWS, dtype=jnp.float32)), rows)
    compiled = jax.jit(lambda batch: sort_rows(batch, mesh, parts), out_shardings=rows).lower(batch).compile()
    assert "all-" not in compiled.as_text() and "collective" not in compiled.as_text()
    done = compiled(batch)
    place = np.asarray(done.reward).astype(int)
    for got, given in zip(jax.tree.leaves(done), jax.tree.leaves(batch), strict=True):
        np.testing.assert_array_equal(got, np.asarray(given)[place])
    lengths, shards = lengths_of(batch), batch_shards(mesh)
    for shard, mine in enumerate(place.reshape(shards, -1)):
        np.testing.assert_array_equal(np.sort(mine), np.arange(ROWS).reshape(shards, -1)[shard])
    in_parts = np.asarray(split(done, parts).reward).astype(int).reshape(parts, shards, -1)
    for shard in range(shards):
        order = lengths[in_parts[:, shard].ravel()]
        np.testing.assert_array_equal(order, np.sort(order))


def test_rows_and_their_arrays_are_cut_to_their_window() -> None:
    batch = long_tailed()
    np.testing.assert_array_equal(batch.lengths, lengths_of(batch))
    assert batch.lengths[EMPTY] == 0 and max(batch.lengths) == LADDER[1]
    seen = []

    def run(cut: TrainBatch, mu: jax.Array) -> jax.Array:
        seen.append((cut.tokens.shape[1], cut.reward.shape, mu.shape[1]))
        return jnp.sum(mu)

    short = jax.tree.map(lambda x: x[EMPTY : EMPTY + 1], batch)
    np.testing.assert_allclose(in_window(run, (7, 12), short, short.mu), np.sum(short.mu[:, :7]), rtol=1e-6)
    assert seen == [(width, (1,), width) for width in (7, 12, LENGTH)]


def recording_policy(policy: Policy, seen: list[int]) -> Policy:
    """Return the policy. Each forward without a cache appends its width to `seen` when it runs."""

    def apply(params, tokens, start, cache=None, logits_at=None) -> PolicyOutput:
        if cache is None:
            jax.debug.callback(lambda: seen.append(tokens.shape[1]))
        return policy.apply(params, tokens, start, cache, logits_at)

    return replace(policy, apply=apply)


def fitting(prompts: Prompts, rollout: Rollout, ladder: tuple[int, ...], parts: int) -> list[int]:
    """Return the smallest window for each part of the rows, which are sorted by length."""
    lengths = np.sort(np.repeat(np.asarray(prompts.lengths), GROUP) + np.asarray(rollout.lengths))
    choices = (*ladder, prompts.tokens.shape[1] + BUDGET)
    return [min(window for window in choices if window >= part.max()) for part in np.split(lengths, parts)]


@pytest.mark.slow
def test_the_fused_step_runs_each_microbatch_at_its_window_and_is_traced_once() -> None:
    config, seen, chosen = replace(CONFIG, microbatches=4, loss=LOSS, ladder=(12, 22, 30)), [], []
    (policy, drafter), rollout_fn = training.networks(unroll=2), training.traced_once(speculative_rollout)
    step = make_train_step(recording_policy(policy, seen), drafter, count_fives, config, ONE, rollout_fn)
    state = training.state_on(ONE, config, with_reference=True)
    ragged = make_prompts()
    for prompts in (ragged, replace(ragged, lengths=jnp.ones_like(ragged.lengths))):
        state, rollout, _ = jax.block_until_ready(step(state, prompts))
        jax.effects_barrier()
        chosen.append(fitting(prompts, rollout, config.ladder[:2], config.microbatches))
        # One forward for the log-probs of the reference, one for the gradients.
        assert sorted(seen) == sorted(2 * chosen[-1])
        seen.clear()
    assert chosen[0] != chosen[1] and set(chosen[0] + chosen[1]) == {12, 22, 26}


SMALL = replace(SHAPE, hidden_size=8, feature_layers=())
MTP = mtp_config(SHAPE, "mimo")
OTHERS: dict[str, tuple[Drafter, Callable[[jax.Array], PyTree]]] = {
    "mtp": (make_mtp(MTP, POLICY, unroll=2), partial(init_mtp, MTP)),
    "model": (ModelDrafter(make_policy(SMALL), "hybrid"), partial(init_decoder, SMALL)),
    "ngram": (NGramDrafter(VOCAB, 1, 2), lambda key: {}),
}


@pytest.mark.parametrize("name", [pytest.param("mtp", marks=pytest.mark.slow), "model", "ngram"])
def test_other_drafts_by_chunks(name: str) -> None:
    (drafter, init), batch = OTHERS[name], long_tailed()
    policy, draft = (init_params(x, jax.random.key(2), ONE) for x in (partial(init_decoder, SHAPE), init))

    @partial(jax.jit, static_argnums=1)
    def run(draft: PyTree, chunk: int) -> tuple[PyTree, jax.Array]:
        output = jax.lax.stop_gradient(teacher_forced(POLICY, policy, batch.tokens, chunk))

        def loss(draft: PyTree) -> tuple[jax.Array, jax.Array]:
            return drafter.loss(Params(policy, draft), batch.tokens, output, batch.completion, LAW)

        return jax.grad(loss, has_aux=True)(draft)

    (expected, overlap), (found, same) = (run(draft, chunk) for chunk in (0, CHUNK))
    np.testing.assert_allclose(same, overlap, rtol=1e-5, atol=1e-6)
    if draft:
        assert relative_gap(found, expected) < 1e-6


@pytest.mark.parametrize("chunk", [0, 1, 3, 4, 7, 9])
def test_any_chunk_reads_every_position_once(chunk: int) -> None:
    x = jnp.arange(2 * 7 * 3, dtype=jnp.float32).reshape(2, 7, 3)
    y = jnp.arange(14).reshape(2, 7)
    doubled, rows = by_position(lambda x, y: (2 * x, y + 1), chunk, x, y)
    np.testing.assert_array_equal(doubled, 2 * x)
    np.testing.assert_array_equal(rows, y + 1)

"""Windows follow from lengths, rows stay on their shard, and losses and gradients do not change."""

from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from specjax.parallel.mesh import BATCH_AXES, batch_shards
from specjax.rollout.speculative import speculative_rollout
from specjax.sampling import SamplingLaw
from specjax.testing.hlo import Program, collectives
from specjax.train.batch import TrainBatch, split
from specjax.train.config import TrainConfig
from specjax.train.gradients import LossContext, accumulate, log_probs_of
from specjax.train.ladder import in_window, rung, sort_rows, windows
from specjax.train.loss import LossConfig
from specjax.train.loss_sums import Sums
from specjax.train.train_step import make_train_step
from specjax.types import Params, Policy, PolicyOutput, Prompts, Rollout
from tests.refusals import refuses
from tests.specjax.training import (
    BUDGET,
    CONFIG,
    GROUP,
    VOCAB,
    count_fives,
    make_prompts,
    mesh_of,
    networks,
    params_on,
    relative_gap,
    state_on,
    traced_once,
)

ROWS, LENGTH, LADDER = 32, 24, (3, 22)
FAILED, EMPTY = 17, 9
LAW = SamplingLaw(temperature=0.7)
LOSS = LossConfig(kl_coefficient=0.3)
POLICY, DRAFTER = networks(unroll=2)
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


def program(mesh: Mesh, microbatches: int, ladder: tuple[int, ...]):
    """Return reference log-probs and both gradients of the batch, and the text of the program."""
    context = LossContext(POLICY, DRAFTER, LAW, LOSS, microbatches=microbatches, ladder=ladder)

    def run(params: Params, batch: TrainBatch) -> Gradients:
        if ladder:
            batch = sort_rows(batch, mesh, microbatches)
        frozen = jax.tree.map(lambda x: x * jnp.asarray(1.1, x.dtype), params.policy)
        return accumulate(context, params, replace(batch, reference=log_probs_of(context, frozen, batch, mesh)))

    params = params_on(mesh)
    batch = jax.device_put(long_tailed(), NamedSharding(mesh, P(BATCH_AXES)))
    with jax.set_mesh(mesh):
        compiled = jax.jit(run).lower(params, batch).compile()
        return compiled(params, batch), compiled.as_text()


@pytest.fixture(scope="module")
def padded() -> Gradients:
    return program(ONE, 1, ())[0]


@pytest.mark.parametrize(
    "shape, microbatches",
    [
        ((1, 1, 1), 4),
        pytest.param((1, 1, 1), 1, marks=pytest.mark.slow),
        pytest.param((8, 1, 1), 2, marks=pytest.mark.slow),
        pytest.param((2, 2, 2), 4, marks=pytest.mark.slow),
    ],
)
def test_gradients_and_sums_are_those_of_padded_rows(shape, microbatches, padded) -> None:
    (gradients, sums), text = program(mesh_of(*shape), microbatches, LADDER)
    assert relative_gap(gradients.policy, padded[0].policy) < 1e-5
    assert relative_gap(gradients.draft, padded[0].draft) < 1e-5
    chex.assert_trees_all_close(sums, padded[1], rtol=1e-5)
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


def recording_policy(seen: list[int]) -> Policy:
    """Return the policy. Each forward without a cache appends its width to `seen` when it runs."""

    def apply(params, tokens, start, cache=None, logits_at=None) -> PolicyOutput:
        if cache is None:
            jax.debug.callback(lambda: seen.append(tokens.shape[1]))
        return POLICY.apply(params, tokens, start, cache, logits_at)

    return replace(POLICY, apply=apply)


def fitting(prompts: Prompts, rollout: Rollout, ladder: tuple[int, ...], parts: int) -> list[int]:
    """Return the smallest window for each part of the rows, which are sorted by length."""
    lengths = np.sort(np.repeat(np.asarray(prompts.lengths), GROUP) + np.asarray(rollout.lengths))
    choices = (*ladder, prompts.tokens.shape[1] + BUDGET)
    return [min(window for window in choices if window >= part.max()) for part in np.split(lengths, parts)]


@pytest.mark.slow
def test_the_fused_step_runs_each_microbatch_at_its_window_and_is_traced_once() -> None:
    config, seen, chosen = replace(CONFIG, microbatches=4, loss=LOSS, ladder=(12, 22, 30)), [], []
    rollout_fn = traced_once(speculative_rollout)
    step = make_train_step(recording_policy(seen), DRAFTER, count_fives, config, ONE, rollout_fn)
    state = state_on(ONE, config, with_reference=True)
    ragged = make_prompts()
    for prompts in (ragged, replace(ragged, lengths=jnp.ones_like(ragged.lengths))):
        state, rollout, _ = jax.block_until_ready(step(state, prompts))
        jax.effects_barrier()
        chosen.append(fitting(prompts, rollout, config.ladder[:2], config.microbatches))
        # One forward for the log-probs of the reference, one for the gradients.
        assert sorted(seen) == sorted(2 * chosen[-1])
        seen.clear()
    assert chosen[0] != chosen[1] and set(chosen[0] + chosen[1]) == {12, 22, 26}


@pytest.mark.parametrize("ladder", [(2,), (0, 8), (-4,), (8, 4), (8, 8)])
def test_bad_ladders_are_refused(ladder) -> None:
    with refuses(f"ladder = {ladder}: "):
        TrainConfig(ladder=ladder)

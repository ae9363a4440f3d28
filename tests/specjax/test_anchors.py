"""Anchors are drawn uniformly, by their row's key alone, and give unbiased estimates of sums over all tokens."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.keys import seed_step
from specjax.train.batch import Sequences, TrainBatch
from specjax.train.draft.anchors import draw_anchors, spaced_anchors, with_keys
from specjax.train.draft.loss import DraftSums
from specjax.train.gradients import accumulate
from specjax.train.loss_context import LossContext
from specjax.types import PyTree
from tests.refusals import refuses
from tests.specjax.training import CONFIG, mesh_of, networks, params_on, relative_gap

POLICY, DRAFTER = networks(unroll=3)
ROWS, WIDTH = 8, 14
# A row without a completion, rows with fewer tokens than anchors, and a row whose first token no draft predicts.
START, END = [4, 1, 3, 2, 5, 4, 6, 3], [4, 14, 4, 6, 14, 13, 9, 12]


def rows(step: int = 0, width: int = WIDTH) -> Sequences:
    column, start, end = np.arange(width)[None], np.array(START)[:, None], np.array(END)[:, None]
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 16, (ROWS, WIDTH))[:, :width], jnp.int32)
    return with_keys(Sequences(tokens, jnp.asarray((column >= start) & (column < end))), seed_step(3, step), 0)


def test_anchors_are_distinct_completion_tokens_and_stand_for_all() -> None:
    sequences = rows()
    place, weight = map(np.asarray, draw_anchors(sequences.keys, sequences.completion, 4))
    for row, (drawn, stands_for) in enumerate(zip(place, weight, strict=True)):
        candidates = range(max(START[row], 2), END[row])
        counted = drawn[stands_for > 0].tolist()
        assert len(set(counted)) == len(counted) == min(4, len(candidates)) and set(counted) <= set(candidates)
        assert stands_for.sum() == pytest.approx(len(candidates))
    # Neither the width of the window nor the index of the row matters.
    swapped = jax.tree.map(lambda x: x[::-1], sequences)
    np.testing.assert_array_equal(draw_anchors(swapped.keys, swapped.completion, 4).place[::-1], place)
    short = rows(width=9)
    six = draw_anchors(short.keys[6:7], short.completion[6:7], 4)
    np.testing.assert_array_equal(six.place[0][six.weight[0] > 0], place[6][weight[6] > 0])


def test_spaced_anchors_are_all_tokens_of_successive_steps() -> None:
    completion, seen = np.asarray(rows().completion), []
    for step in range(3):
        offset = np.arange(ROWS) + step
        place, weight = spaced_anchors(completion, 14, 3, offset)
        assert place.shape == (ROWS, 5) and (np.diff(place) > 0).all()
        traced = jax.jit(partial(spaced_anchors, count=14, stride=3))(completion, offset=offset)
        for mine, other in zip((place, weight), traced, strict=True):
            np.testing.assert_array_equal(mine, other)
        for row, start, end in zip(range(ROWS), START, END, strict=True):
            counted = place[row][weight[row] > 0]
            assert counted.size == 0 or counted[0] == max(start, 2) + (row + step) % min(3, end - max(start, 2))
            assert all(np.diff(counted) == 3) and weight[row].sum() == pytest.approx(end - max(start, 2), rel=1e-6)
            seen += [(row, int(token)) for token in counted]
    tokens = {(row, token) for row in range(ROWS) for token in range(max(START[row], 2), END[row])}
    # A row with fewer tokens than the stride counts some of them twice.
    assert set(seen) == tokens and len(seen) == sum(
        max(end - max(start, 2), 3) for start, end in zip(START, END, strict=True) if end > start
    )


def test_every_token_is_drawn_equally_often() -> None:
    drawn = np.zeros((ROWS, WIDTH))
    draw = jax.jit(partial(draw_anchors, count=3))
    for step in range(300):
        sequences = rows(step)
        place, weight = map(np.asarray, draw(sequences.keys, sequences.completion))
        np.add.at(drawn, (np.arange(ROWS)[:, None], place), weight > 0)
    # Row 4 has 9 candidates; a third of 300 draws each, within five standard deviations of 8.2.
    np.testing.assert_allclose(drawn[4, 5:14], 100, atol=41)


def test_rows_need_keys_and_draw_differently_in_each_step_and_source() -> None:
    first = rows()
    others = rows(step=1), with_keys(first, seed_step(3, 0), 1)
    for other in others:
        assert not np.array_equal(other.keys, first.keys)
    with refuses("anchors = 4: "):
        LossContext(POLICY, DRAFTER, CONFIG.rollout.law, anchors=4).anchors_of(replace(first, keys=None))


def test_gradients_of_anchors_average_to_that_of_all_tokens() -> None:
    """With as many anchors as tokens, the gradient is equal. With few, microbatches and windows change nothing."""
    params, zeros = params_on(mesh_of(1, 1, 1)), jnp.zeros((ROWS, WIDTH))

    def gradient(context: LossContext, sequences: Sequences) -> tuple[PyTree, DraftSums]:
        scores = dict(reward=zeros[:, 0], counted=jnp.ones(ROWS, bool), advantage=zeros)
        gradients, sums = accumulate(context, params, TrainBatch(**vars(sequences), **scores))
        return gradients.draft, sums.draft

    context = LossContext(POLICY, DRAFTER, CONFIG.rollout.law)
    every, sums = jax.jit(partial(gradient, context))(rows())
    at_all, same = jax.jit(partial(gradient, replace(context, anchors=WIDTH)))(rows())
    assert relative_gap(at_all, every) < 1e-5
    np.testing.assert_allclose((same.loss, same.overlap), (sums.loss, sums.overlap), rtol=1e-5)

    few = jax.jit(partial(gradient, replace(context, anchors=3)))
    parts = jax.jit(partial(gradient, replace(context, anchors=3, microbatches=4, ladder=(9,))))
    assert relative_gap(parts(rows())[0], few(rows())[0]) < 1e-5
    draws = [few(rows(step)) for step in range(200)]
    mean = jax.tree.map(lambda *x: np.mean(x, axis=0), *(gradient for gradient, _ in draws))
    assert relative_gap(draws[0][0], every) > 0.2 > relative_gap(mean, every)
    np.testing.assert_allclose(np.mean([x.overlap for _, x in draws]), sums.overlap, rtol=0.02)

"""Losses in chunks of positions: gradients are the same, and the compiled program holds no logits of whole rows."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.decoder import init_decoder, make_policy
from models.drafts.eagle3 import init_eagle3, make_eagle3
from models.drafts.mtp import init_mtp, make_mtp, mtp_config
from models.params import init_params
from specjax.chunks import by_position
from specjax.drafters import Drafter, ModelDrafter, NGramDrafter
from specjax.log_probs import teacher_forced
from specjax.sampling import SamplingLaw
from specjax.testing.hlo import Program
from specjax.train.batch import TrainBatch
from specjax.train.config import TrainConfig
from specjax.train.gradients import LossContext, accumulate, log_probs_of
from specjax.train.loss import LossConfig
from specjax.train.loss_sums import Sums
from specjax.types import Params, PyTree
from tests.refusals import refuses
from tests.specjax.training import DECODER, HEAD, mesh_of, ragged_batch, relative_gap

# No other dimension equals VOCAB or DRAFT_VOCAB, and no window is a multiple of the chunk.
ROWS, LENGTH, VOCAB, DRAFT_VOCAB, CHUNK, PARTS, LADDER = 8, 15, 38, 34, 4, 2, (10,)
LAW = SamplingLaw(temperature=0.7)
LOSS = LossConfig(importance_cap=1.5, kl_coefficient=0.3)
CONFIG = replace(DECODER, vocab_size=VOCAB, num_layers=1, feature_layers=(0,))
SHAPE = replace(HEAD, vocab_size=VOCAB, draft_vocab_size=DRAFT_VOCAB, feature_size=16)
POLICY = make_policy(CONFIG)
IDS = np.sort(np.random.default_rng(0).permutation(VOCAB)[:DRAFT_VOCAB]).astype(np.int32)
DRAFTER = make_eagle3(SHAPE, POLICY, IDS, unroll=2)
# Chunks change the order of summation in a weight's gradient.
CLOSE = 1e-6


def params_on(*shape: int) -> Params:
    mesh = mesh_of(*shape)
    inits = partial(init_decoder, CONFIG), partial(init_eagle3, SHAPE)
    return Params(*(init_params(init, jax.random.key(i), mesh) for i, init in enumerate(inits)))


@pytest.fixture(scope="module")
def batch() -> TrainBatch:
    return ragged_batch(ROWS, LENGTH, VOCAB)


def program(
    chunk: int, mesh: tuple[int, int, int], batch: TrainBatch, parts: int = PARTS, ladder: tuple[int, ...] = ()
) -> tuple[jax.stages.Compiled, Params]:
    context = LossContext(POLICY, DRAFTER, LAW, LOSS, microbatches=parts, ladder=ladder, logit_chunk=chunk)

    def run(params: Params, batch: TrainBatch) -> tuple[Params, Sums]:
        reference = log_probs_of(replace(context, law=SamplingLaw()), params.policy, batch, mesh_of(*mesh))
        return accumulate(context, params, replace(batch, reference=reference))

    params = params_on(*mesh)
    with jax.set_mesh(mesh_of(*mesh)):
        return jax.jit(run).lower(params, batch).compile(), params


@pytest.fixture(scope="module")
def whole(batch: TrainBatch) -> tuple[Params, Sums, str]:
    compiled, params = program(0, (1, 1, 1), batch)
    gradients, sums = compiled(params, batch)
    return gradients, sums, compiled.as_text() or ""


def check_same(found: tuple[Params, Sums], whole: tuple[Params, Sums, str], close: float) -> None:
    gradients, sums = found
    assert relative_gap(gradients.policy, whole[0].policy) < close
    assert relative_gap(gradients.draft, whole[0].draft) < close
    chex.assert_trees_all_close(sums, whole[1], rtol=1e-5, atol=1e-6)


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


def test_chunks_have_the_same_gradients_and_no_logits_of_whole_rows(batch, whole) -> None:
    compiled, params = program(CHUNK, (1, 1, 1), batch)
    check_same(compiled(params, batch), whole, CLOSE)
    rows = ROWS // PARTS
    # A weight has one number per token and feature.
    assert largest_positions(compiled.as_text()) <= max(rows * CHUNK, CONFIG.hidden_size)
    assert largest_positions(whole[2]) >= rows * (LENGTH - 1)


@pytest.mark.slow
def test_chunks_within_a_ladder(batch, whole) -> None:
    compiled, params = program(CHUNK, (1, 1, 1), batch, ladder=LADDER)
    check_same(compiled(params, batch), whole, CLOSE)
    assert largest_positions(compiled.as_text()) <= max(ROWS // PARTS * CHUNK, CONFIG.hidden_size)


@pytest.mark.slow
def test_chunks_of_a_vocabulary_over_the_tensor_axis(batch, whole) -> None:
    compiled, params = program(CHUNK, (2, 1, 2), batch, 1)
    check_same(compiled(*jax.device_put((params, batch), compiled.input_shardings[0])), whole, 1e-5)


SMALL = replace(CONFIG, hidden_size=8, feature_layers=())
MTP = mtp_config(CONFIG, "mimo")
OTHERS: dict[str, tuple[Drafter, Callable[[jax.Array], PyTree]]] = {
    "mtp": (make_mtp(MTP, POLICY, unroll=2), partial(init_mtp, MTP)),
    "model": (ModelDrafter(make_policy(SMALL), "hybrid"), partial(init_decoder, SMALL)),
    "ngram": (NGramDrafter(VOCAB, 1, 2), lambda key: {}),
}


@pytest.mark.parametrize("name", [pytest.param("mtp", marks=pytest.mark.slow), "model", "ngram"])
def test_other_drafts_by_chunks(name: str, batch: TrainBatch) -> None:
    drafter, init = OTHERS[name]
    policy, draft = (init_params(x, jax.random.key(2), mesh_of(1, 1, 1)) for x in (partial(init_decoder, CONFIG), init))

    @partial(jax.jit, static_argnums=1)
    def run(draft: PyTree, chunk: int) -> tuple[PyTree, jax.Array]:
        output = jax.lax.stop_gradient(teacher_forced(POLICY, policy, batch.tokens, chunk))

        def loss(draft: PyTree) -> tuple[jax.Array, jax.Array]:
            return drafter.loss(Params(policy, draft), batch.tokens, output, batch.completion, LAW)

        return jax.grad(loss, has_aux=True)(draft)

    (expected, overlap), (found, same) = (run(draft, chunk) for chunk in (0, CHUNK))
    np.testing.assert_allclose(same, overlap, rtol=1e-5, atol=1e-6)
    if draft:
        assert relative_gap(found, expected) < CLOSE


@pytest.mark.parametrize("chunk", [0, 1, 3, 4, 7, 9])
def test_any_chunk_reads_every_position_once(chunk: int) -> None:
    x = jnp.arange(2 * 7 * 3, dtype=jnp.float32).reshape(2, 7, 3)
    y = jnp.arange(14).reshape(2, 7)
    doubled, rows = by_position(lambda x, y: (2 * x, y + 1), chunk, x, y)
    np.testing.assert_array_equal(doubled, 2 * x)
    np.testing.assert_array_equal(rows, y + 1)


def test_a_negative_chunk_is_refused() -> None:
    with refuses("logit_chunk = -1:...0"):
        TrainConfig(logit_chunk=-1)

"""The accept laws, by enumeration of all drafts, and the verifiers for given noise."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.testing import assert_verifier_lossless
from specjax.testing.verifiers import (
    Tree,
    chances,
    emitted_laws,
    every_draft,
    every_length,
    following,
    kinds,
    logs,
    mean_accepted,
    stops_and_residuals,
)
from specjax.verify import VERIFIERS, AcceptLaw, LawOf, Noise, accept_law, block_law, draw

SIZES = [(2, 1), (3, 3), (5, 4)]
LAWS = [accept_law, block_law]
verify = jax.jit(lambda name, *args: VERIFIERS[name].verify(*args), static_argnums=0)


def case(name: str, vocab: int, k: int) -> tuple[Tree, Tree]:
    """Return the trees of conditional distributions of policy and draft."""
    return {kind: (p, q) for kind, p, q in kinds(np.random.default_rng([vocab, k]), vocab, k)}[name]


@pytest.mark.parametrize("vocab, k", [(2, 1), (3, 4), (4, 3), (5, 2), (5, 4)])
@pytest.mark.parametrize("law", LAWS)
def test_enumeration_gives_the_product_law(law: LawOf, vocab: int, k: int):
    """It agrees up to float64 rounding, for all drafts and lengths of every kind of tree."""
    result = assert_verifier_lossless(law, vocab=vocab, draft_length=k)
    assert result.rounds == 3 * 7 * (k + 1) * vocab**k
    assert result.error < 1e-14


@pytest.mark.parametrize("law", LAWS)
def test_enumeration_in_float32_gives_the_product_law_to_rounding(law: LawOf):
    def rounded(log_p: jax.Array, log_q: jax.Array, draft: jax.Array, length: jax.Array) -> AcceptLaw:
        return law(log_p.astype(jnp.float32), log_q.astype(jnp.float32), draft, length)

    assert assert_verifier_lossless(rounded, trees=1, tolerance=1e-6).error > 1e-9


def thresholds(p: np.ndarray, q: np.ndarray, draft: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (h, P) of one draft by the paper's formulas, in probabilities."""
    h, weight = np.zeros(length), np.ones(length + 1)
    for i in range(1, length + 1):
        weight[i] = min(1.0, weight[i - 1] * p[i - 1, draft[i - 1]] / q[i - 1, draft[i - 1]])
        if i < length:
            left = np.maximum(weight[i] * p[i] - q[i], 0.0).sum()
            h[i - 1] = left / (left + 1 - weight[i]) if left + 1 - weight[i] > 0 else 1.0
    h[length - 1 :] = weight[length:]
    return h, weight


@pytest.mark.parametrize("kind", ["random", "with impossible tokens", "one-hot"])
def test_block_stops_at_the_last_uniform_below_its_threshold(kind: str):
    p, q = case(kind, 3, 3)
    drafts = every_draft(3, 3)[chances(q, 3) > 0]
    log_p, log_q = logs(p, drafts), logs(q[:3], drafts)
    for length in (1, 2, 3):
        stop, residual = stops_and_residuals(block_law, log_p, log_q, drafts, np.full(len(drafts), length))
        for row, draft in enumerate(drafts):
            h, weight = thresholds(np.exp(log_p[row]), np.exp(log_q[row]), draft, length)
            beaten = np.append(1.0, h) * np.append(np.cumprod(1 - h[::-1])[::-1], 1.0)
            np.testing.assert_allclose(stop[row], np.pad(beaten, (0, 3 - length)), atol=1e-14)
            for m in range(length):
                left = np.maximum(weight[m] * np.exp(log_p[row, m]) - np.exp(log_q[row, m]), 0.0)
                if stop[row, m] > 1e-12:
                    np.testing.assert_allclose(residual[row, m], left / left.sum(), atol=1e-12)
            np.testing.assert_allclose(residual[row, length], np.exp(log_p[row, length]), atol=1e-14)


@pytest.mark.parametrize("k", [2, 3])
def test_block_accepts_at_least_as_many_as_rejection_in_expectation(k: int):
    """This holds for every tree and length. In total it accepts more, and equally many of a deterministic draft."""
    gains = []
    for seed in range(5):
        for kind, p, q in kinds(np.random.default_rng([3, k, seed]), 3, k):
            for length in range(k + 1):
                token, block = (mean_accepted(law, p, q, length) for law in LAWS)
                assert block >= token - 1e-12
                if kind == "one-hot" or length < 2:
                    assert block == pytest.approx(token, abs=1e-12)
                elif kind == "random":
                    gains.append(block - token)
    assert np.mean(gains) > 0.01


def test_the_example_of_the_paper():
    """Two tokens, p = (1/3, 2/3) and q = (2/3, 1/3) in any context, draft length 2: 10/9 tokens become 11/9."""
    p: Tree = [np.broadcast_to([1 / 3, 2 / 3], (*[2] * i, 2)) for i in range(3)]
    q: Tree = [1 - level for level in p]
    assert mean_accepted(accept_law, p, q, 2) == pytest.approx(10 / 9, abs=1e-14)
    assert mean_accepted(block_law, p, q, 2) == pytest.approx(11 / 9, abs=1e-14)


@pytest.mark.parametrize("kind", ["random", "one-hot"])
def test_values_beyond_a_draft_do_not_count(kind: str):
    """Values beyond the draft may be anything, even no distribution."""
    p, q = case(kind, 3, 3)
    drafts = every_draft(3, 3)
    log_p, log_q, length = logs(p, drafts), logs(q[:3], drafts), np.full(len(drafts), 1)
    junk = np.where(np.arange(3)[:, None] < 1, log_q, np.nan)
    for law in LAWS:
        clean, dirty = (stops_and_residuals(law, log_p, x, drafts, length) for x in (log_q, junk))
        for x, y in zip(clean, dirty, strict=True):
            np.testing.assert_array_equal(x, y)


def confident(q: Tree, cut_after: int) -> np.ndarray:
    """Return the number of tokens of each draft up to and including the first with q < 0.3."""
    vocab, k = q[0].shape[0], len(q) - 1
    drafts = every_draft(vocab, k)
    scores = np.stack([level[tuple(drafts[:, : i + 1].T)] for i, level in enumerate(q[:k])], 1)
    unsure = np.pad(scores < 0.3, ((0, 0), (0, 1)), constant_values=True)
    return np.minimum(unsure.argmax(axis=1) + cut_after, k)[None]


def distance(law: np.ndarray, other: np.ndarray) -> float:
    return 0.5 * float(np.abs(law - other).sum())


@pytest.mark.parametrize("law", LAWS)
def test_a_draft_may_stop_after_a_sampled_token_but_not_before_and_not_be_chosen_after_sampling(law: LawOf):
    p, q = case("random", 3, 3)
    (before,), (after,) = (emitted_laws(law, p, q, confident(q, shift)) for shift in (0, 1))
    assert distance(before, following(p)[0]) > 0.01
    assert distance(after, following(p)[0]) < 1e-6
    (chosen,) = emitted_laws(law, p, case("one-hot", 3, 3)[1], every_length(3, 3)[-1:], verified=q)
    assert distance(chosen, following(p)[0]) > 0.01


def without_residual(law: AcceptLaw) -> AcceptLaw:
    return law._replace(log_q=jnp.full_like(law.log_q, -jnp.inf))


def stopping_at_the_first_failure(law: AcceptLaw) -> AcceptLaw:
    """Faulty law that stops at the first failure. (P(exactly m) / P(at most m) is the threshold h_m.)"""
    stop = law.stop()
    at_most = jnp.cumsum(stop, axis=1)
    passed = jnp.where(at_most > 0, stop / at_most, 1.0)[:, 1:]
    return law._replace(survival=jnp.cumprod(passed, axis=1))


def unweighted(law: AcceptLaw) -> AcceptLaw:
    return law._replace(log_weight=jnp.zeros_like(law.log_weight))


@pytest.mark.parametrize(
    "law, fault",
    [
        (accept_law, without_residual),
        (block_law, without_residual),
        (block_law, unweighted),
        (block_law, stopping_at_the_first_failure),
    ],
)
def test_a_faulty_law_is_detected(law: LawOf, fault: Callable[[AcceptLaw], AcceptLaw]):
    with pytest.raises(AssertionError, match=r"draft .*\d+ rounds"):
        assert_verifier_lossless(lambda *proposal: fault(law(*proposal)), trees=1)


def batch(vocab: int, k: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, Noise]:
    """Return 1000 random rounds: log_p, log_q, draft, length, and independent noise in the shape of `coupled`."""
    generator, rows = np.random.default_rng(seed), 1000
    p = generator.dirichlet(np.full(vocab, 0.5), (rows, k + 1))
    q = generator.dirichlet(np.full(vocab, 0.5), (rows, k))
    noise = Noise(
        draft=generator.gumbel(size=(rows, k, vocab)).astype(np.float32),
        uniform=generator.random(rows).astype(np.float32),
        emit=generator.gumbel(size=(rows, k + 1, vocab)).astype(np.float32),
    )
    draft = generator.integers(vocab, size=(rows, k)).astype(np.int32)
    length = generator.integers(k + 1, size=rows).astype(np.int32)
    return np.log(p).astype(np.float32), np.log(q).astype(np.float32), draft, length, noise


@pytest.mark.parametrize("vocab, k", SIZES)
def test_coupled_emits_what_plain_sampling_emits(vocab: int, k: int):
    log_p, log_q, draft, length, noise = batch(vocab, k, seed=k)
    plain = np.argmax(log_p + noise.emit, axis=-1)
    accepted, token = map(np.asarray, verify("coupled", log_p, log_q, draft, length, noise))
    for row in range(len(draft)):
        m = accepted[row]
        assert [*draft[row, :m], token[row]] == plain[row, : m + 1].tolist()
        assert m == length[row] or draft[row, m] != plain[row, m]
    assert set(accepted) == set(range(k + 1))


def test_draw_accepts_and_recovers_at_the_rates_of_the_law():
    """For one draft and many draws of noise, compare frequencies of (accepted, token) with stop times residual."""
    p, q = case("random", 3, 3)
    draft = np.array([[0, 2, 1]])
    log_p, log_q = (x.astype(np.float32) for x in (logs(p, draft), logs(q[:3], draft)))
    draws, generator = 200_000, np.random.default_rng(0)
    noise = Noise(
        draft=np.zeros((draws, 3, 3), np.float32),
        uniform=generator.random(draws).astype(np.float32),
        emit=generator.gumbel(size=(draws, 1, 3)).astype(np.float32),
    )

    @jax.jit
    def verdicts(noise: Noise) -> tuple[jax.Array, jax.Array]:
        rows = len(noise.uniform)
        law = accept_law(*(jnp.repeat(x, rows, axis=0) for x in (log_p, log_q, draft)), jnp.full(rows, 3))
        return draw(law, noise)

    accepted, token = map(np.asarray, verdicts(noise))
    stop, residual = (x[0] for x in stops_and_residuals(accept_law, log_p, log_q, draft, np.array([3])))
    observed = np.zeros((4, 3))
    np.add.at(observed, (accepted, token), 1 / draws)
    np.testing.assert_allclose(observed, stop[:, None] * residual, atol=0.006)


def one_round(p: list[float], q: list[float], drafted: int, uniform: float) -> tuple[int, int]:
    """Return (accepted, token) of a single round with one drafted token, without Gumbel noise."""
    with np.errstate(divide="ignore"):
        log_p, log_q = (np.log(np.array([[x] * count], np.float32)) for x, count in ((p, 2), (q, 1)))
    zeros = np.zeros((1, 1, len(p)), np.float32)
    noise = Noise(draft=zeros, uniform=np.full(1, uniform, np.float32), emit=zeros)
    draft, length = np.array([[drafted]], np.int32), np.array([1], np.int32)
    accepted, token = verify("rejection", log_p, log_q, draft, length, noise)
    return int(accepted[0]), int(token[0])


def test_impossible_tokens_are_rejected_and_likelier_ones_accepted():
    largest = float(np.nextafter(np.float32(1), np.float32(0)))
    assert one_round([0.0, 1.0], [1.0, 0.0], drafted=0, uniform=0.0) == (0, 1)
    assert one_round([0.5, 0.5], [0.5, 0.5], drafted=0, uniform=0.0)[0] == 1
    assert one_round([0.75, 0.25], [0.75, 0.25], drafted=0, uniform=largest)[0] == 1
    assert one_round([0.75, 0.25], [0.5, 0.5], drafted=0, uniform=largest)[0] == 1
    assert one_round([0.5, 0.5], [0.75, 0.25], drafted=0, uniform=largest) == (0, 1)


def residual_of(log_p: list[float], log_q: list[float]) -> np.ndarray:
    p, q = (np.array([x, x], np.float32)[None] for x in (log_p, log_q))
    law = accept_law(jnp.asarray(p), jnp.asarray(q[:, :1]), jnp.array([[0]]), jnp.array([1]))
    return np.exp(np.asarray(law.residual(jnp.array([0]))[0]))


def test_a_residual_of_little_or_no_mass_is_a_law():
    """Without mass it is the policy's law. With a mass too small for float32 differences from 1, it is exact."""
    equal = np.log([0.25, 0.75]).tolist()
    np.testing.assert_allclose(residual_of(equal, equal), [0.25, 0.75], rtol=1e-6)
    np.testing.assert_allclose(residual_of([-1e-9, np.log(1e-9)], [-2e-9, np.log(2e-9)]), [1.0, 0.0])
    np.testing.assert_allclose(residual_of([-1e-42, -np.inf], [-2e-42, -np.inf]), [1.0, 0.0])

"""The accept law by exhaustive enumeration of every draft, and the two verifiers on given noise."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.verify import VERIFIERS, AcceptLaw, Noise, accept_law, draw

# tree[i][prefix] is the law of position i after the `i` tokens of `prefix`: an array of i + 1 axes.
Tree = list[np.ndarray]
Case = tuple[Tree, Tree]
SIZES = [(2, 1), (3, 3), (5, 4)]
verify = jax.jit(lambda name, *args: VERIFIERS[name].verify(*args), static_argnums=0)


def random_tree(generator: np.random.Generator, vocab: int, depth: int, cut: float = 0.0) -> Tree:
    """Dirichlet laws, peaked and flat; with `cut`, that share of the tokens is impossible (never all of them)."""
    tree = []
    for i in range(depth):
        law = generator.gamma(generator.choice([0.3, 1.0, 3.0], (*[vocab] * i, 1)), size=[vocab] * (i + 1)) + 1e-3
        kept = generator.random(law.shape) >= cut
        law = np.where(kept | ~kept.any(axis=-1, keepdims=True), law, 0.0)
        tree.append(law / law.sum(axis=-1, keepdims=True))
    return tree


def without(tree: Tree, tokens: list[int]) -> Tree:
    kept = [np.where(np.isin(np.arange(level.shape[-1]), tokens), 0.0, level) for level in tree]
    return [level / level.sum(axis=-1, keepdims=True) for level in kept]


def most_likely(tree: Tree) -> Tree:
    return [np.eye(level.shape[-1])[level.argmax(axis=-1)] for level in tree]


def case(name: str, vocab: int, k: int) -> Case:
    generator = np.random.default_rng([vocab, k])
    p, q = (random_tree(generator, vocab, k + 1) for _ in range(2))
    half = list(range(vocab // 2))
    return {
        "random": (p, q),
        "draft vocabulary lacks a token": (p, without(q, [0])),
        "impossible tokens": (random_tree(generator, vocab, k + 1, 0.4), random_tree(generator, vocab, k + 1, 0.4)),
        "equal": (p, p),
        "disjoint": (without(p, half), without(q, [v for v in range(vocab) if v not in half])),
        "almost equal": (p, [level * 0.999_999 + 1e-6 / vocab for level in p]),
        "greedy draft": (p, most_likely(q)),
    }[name]


CASES = [
    "random",
    "draft vocabulary lacks a token",
    "impossible tokens",
    "equal",
    "disjoint",
    "almost equal",
    "greedy draft",
]


@jax.jit
def stops_and_residuals(
    log_p: jax.Array, log_q: jax.Array, draft: jax.Array, length: jax.Array
) -> tuple[jax.Array, jax.Array]:
    law = accept_law(log_p, log_q, draft, length)
    rows, count = log_p.shape[:2]
    return law.stop(), jnp.stack([law.residual(jnp.full(rows, m)) for m in range(count)], axis=1)


def logs(tree: Tree, drafts: np.ndarray) -> np.ndarray:
    """Float32 log-probs of each position along each draft, [drafts, len(tree), V]."""
    vocab = tree[0].shape[-1]
    laws = [np.broadcast_to(level[tuple(drafts[:, :i].T)], (len(drafts), vocab)) for i, level in enumerate(tree)]
    with np.errstate(divide="ignore"):
        return np.log(np.stack(laws, axis=1)).astype(np.float32)


def following(p: Tree) -> list[np.ndarray]:
    """Entry i: the joint law of positions i, i + 1, .. given the tokens before, over all the axes."""
    joint = [np.ones(p[-1].shape)]
    for level in reversed(p):
        joint.insert(0, level.reshape(level.shape + (1,) * (joint[0].ndim - level.ndim)) * joint[0])
    return joint


def emitted_laws(p: Tree, drawn: Tree, lengths: np.ndarray, verified: Tree | None = None) -> list[np.ndarray]:
    """For each row of `lengths` [cases, drafts], the law of the next k + 1 tokens, by summing over all drafts.

    drawn: what the drafter samples from. verified: what it says it samples from. After the token that ends the round,
    the rest is sampled from p.
    """
    vocab, k = p[0].shape[0], len(p) - 1
    drafts = np.array(list(itertools.product(range(vocab), repeat=k)))
    weight = np.prod([level[tuple(drafts[:, : i + 1].T)] for i, level in enumerate(drawn[:k])], axis=0)
    log_p, log_q = logs(p, drafts), logs((verified or drawn)[:k], drafts)
    cases = len(lengths)
    log_p, log_q = (jnp.asarray(np.tile(x, (cases, 1, 1))) for x in (log_p, log_q))
    rows = jnp.asarray(np.tile(drafts, (cases, 1)))
    stop, residual = stops_and_residuals(log_p, log_q, rows, jnp.asarray(lengths.ravel()))
    stop = np.asarray(stop, np.float64).reshape(cases, len(drafts), k + 1)
    residual = np.exp(np.asarray(residual, np.float64)).reshape(cases, len(drafts), k + 1, vocab)
    assert not stop[np.arange(k + 1) > lengths[..., None]].any()
    assert np.isfinite(residual).all()
    rest = following(p)

    laws = [np.zeros([vocab] * (k + 1)) for _ in range(cases)]
    for n, d in itertools.product(range(cases), np.flatnonzero(weight)):
        for m in np.flatnonzero(stop[n, d]):
            prefix = tuple(drafts[d, :m])
            after = residual[n, d, m].reshape([vocab] + [1] * (k - m)) * rest[m + 1][prefix]
            laws[n][prefix] += weight[d] * stop[n, d, m] * after
    return laws


def every_length(vocab: int, k: int) -> np.ndarray:
    return np.repeat(np.arange(k + 1)[:, None], vocab**k, axis=1)


@pytest.mark.parametrize("vocab, k", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_enumeration_gives_the_product_law(name: str, vocab: int, k: int):
    p, q = case(name, vocab, k)
    for law in emitted_laws(p, q, every_length(vocab, k)):
        np.testing.assert_allclose(law, following(p)[0], atol=1e-6)


def confident(q: Tree, cut_after: int) -> np.ndarray:
    """How many tokens of each draft precede the first of q < 0.3, or include it."""
    vocab, k = q[0].shape[0], len(q) - 1
    drafts = np.array(list(itertools.product(range(vocab), repeat=k)))
    scores = np.stack([level[tuple(drafts[:, : i + 1].T)] for i, level in enumerate(q[:k])], 1)
    unsure = np.pad(scores < 0.3, ((0, 0), (0, 1)), constant_values=True)
    return np.minimum(unsure.argmax(axis=1) + cut_after, k)[None]


def distance(law: np.ndarray, other: np.ndarray) -> float:
    return 0.5 * float(np.abs(law - other).sum())


def test_a_draft_may_stop_after_a_sampled_token_but_not_before():
    p, q = case("random", 3, 3)
    (before,), (after,) = (emitted_laws(p, q, confident(q, shift)) for shift in (0, 1))
    assert distance(before, following(p)[0]) > 0.01
    assert distance(after, following(p)[0]) < 1e-6


def test_what_is_verified_must_be_what_was_drawn():
    p, q = case("random", 3, 3)
    (law,) = emitted_laws(p, most_likely(q), every_length(3, 3)[-1:], verified=q)
    assert distance(law, following(p)[0]) > 0.01


def test_a_residual_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch):
    p, q = case("random", 4, 2)
    monkeypatch.setattr(AcceptLaw, "residual", lambda law, accepted: law.log_p[jnp.arange(len(accepted)), accepted])
    with jax.disable_jit():
        (law,) = emitted_laws(p, q, every_length(4, 2)[-1:])
    assert distance(law, following(p)[0]) > 0.01


def batch(vocab: int, k: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, Noise]:
    """1000 random rounds: log_p, log_q, draft, length, and independent noise of the shape `coupled` takes."""
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
    """One draft, many uniforms and Gumbels: frequencies of (accepted, token) against stop times residual."""
    p, q = case("random", 3, 3)
    draft = np.array([[0, 2, 1]])
    log_p, log_q = logs(p, draft), logs(q[:3], draft)
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
    stop, residual = (np.asarray(x)[0] for x in stops_and_residuals(log_p, log_q, draft, np.array([3])))
    observed = np.zeros((4, 3))
    np.add.at(observed, (accepted, token), 1 / draws)
    np.testing.assert_allclose(observed, stop[:, None] * np.exp(residual), atol=0.006)


def one_round(p: list[float], q: list[float], drafted: int, uniform: float) -> tuple[int, int]:
    """(accepted, token) of a single round with one drafted token and no Gumbel noise."""
    with np.errstate(divide="ignore"):
        log_p, log_q = (np.log(np.array(x, np.float32))[None, None] for x in (p, q))
    noise = Noise(
        draft=np.zeros((1, 1, len(p)), np.float32),
        uniform=np.full(1, uniform, np.float32),
        emit=np.zeros((1, 1, len(p)), np.float32),
    )
    log_p = np.repeat(log_p, 2, axis=1)
    draft, length = np.array([[drafted]], np.int32), np.array([1], np.int32)
    verdict = verify("rejection", log_p, log_q, draft, length, noise)
    return int(verdict.accepted[0]), int(verdict.token[0])


LARGEST_UNIFORM = float(np.nextafter(np.float32(1), np.float32(0)))


def test_uniform_zero_never_accepts_an_impossible_token():
    assert one_round([0.0, 1.0], [1.0, 0.0], drafted=0, uniform=0.0) == (0, 1)
    assert one_round([0.5, 0.5], [0.5, 0.5], drafted=0, uniform=0.0)[0] == 1


def test_the_largest_uniform_accepts_a_token_the_policy_likes_more():
    assert one_round([0.75, 0.25], [0.75, 0.25], drafted=0, uniform=LARGEST_UNIFORM)[0] == 1
    assert one_round([0.75, 0.25], [0.5, 0.5], drafted=0, uniform=LARGEST_UNIFORM)[0] == 1
    assert one_round([0.5, 0.5], [0.75, 0.25], drafted=0, uniform=LARGEST_UNIFORM) == (0, 1)


def residual_of(log_p: list[float], log_q: list[float]) -> np.ndarray:
    p, q = (np.array([x, x], np.float32)[None] for x in (log_p, log_q))
    _, residual = stops_and_residuals(p, q[:, :1], np.array([[0]]), np.array([1]))
    return np.exp(np.asarray(residual[0, 0]))


def test_a_residual_without_mass_falls_back_to_the_policy():
    equal = np.log([0.25, 0.75]).tolist()
    np.testing.assert_allclose(residual_of(equal, equal), [0.25, 0.75], rtol=1e-6)


def test_a_residual_smaller_than_rounding_is_a_law():
    """p exceeds q at the first token only, by less than a float32 below 1 can tell."""
    np.testing.assert_allclose(residual_of([-1e-9, np.log(1e-9)], [-2e-9, np.log(2e-9)]), [1.0, 0.0])
    np.testing.assert_allclose(residual_of([-1e-42, -np.inf], [-2e-42, -np.inf]), [1.0, 0.0])

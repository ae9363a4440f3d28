"""Test of accept laws by exhaustive enumeration: every draft of a small tree, at every length, in float64."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from specjax.parallel import processes
from specjax.verify import AcceptLaw, LawOf, Noise, Verdict
from specjax.verify import law as verify_law

# tree[i][prefix] is the law of position i after the `i` tokens of `prefix`: an array of i + 1 axes.
Tree = list[np.ndarray]


@dataclass(frozen=True)
class Enumeration:
    """Result of an enumeration.

    error:  largest difference of a probability, at most `tolerance`.
    rounds: number of rounds enumerated: drafts times lengths times trees.
    """

    error: float
    rounds: int
    tolerance: float

    def __str__(self) -> str:
        return f"off by {self.error:.1e} in {self.rounds} rounds enumerated (tolerance {self.tolerance:.0e})"


def assert_verifier_lossless(
    law_of: LawOf, *, vocab: int = 3, draft_length: int = 3, trees: int = 3, tolerance: float = 1e-12, seed: int = 0
) -> Enumeration:
    """Assert that with this accept law the next draft_length + 1 tokens have the policy's law, whatever is drafted.

    There is no level and no power: the resulting law is summed over every draft, at every length, and every outcome of
    `specjax.verify.draw`, and may differ from the policy's only by rounding. It is tested on `trees` random conditional
    laws of policy and draft for each of the `kinds` of this module. Raises AssertionError if the law differs.
    """
    result = Enumeration(0.0, 0, tolerance)
    lengths = every_length(vocab, draft_length)
    for number in range(trees):
        for kind, p, q in kinds(np.random.default_rng([seed, number]), vocab, draft_length):
            laws = emitted_laws(law_of, p, q, lengths)
            error = float(np.abs(laws - following(p)[0]).max())
            result = Enumeration(max(result.error, error), result.rounds + lengths.size, tolerance)
            if result.error > tolerance:
                raise AssertionError(f"not lossless, draft {kind}: {result}")
    return result


def kinds(generator: np.random.Generator, vocab: int, k: int) -> Iterator[tuple[str, Tree, Tree]]:
    """Yield (name, policy, draft) for random, truncated, equal, disjoint and one-hot pairs of laws."""
    p, q, gapped, other = (random_tree(generator, vocab, k + 1, cut) for cut in (0.0, 0.0, 0.4, 0.4))
    half = list(range(vocab // 2))
    yield "random", p, q
    yield "lacks a token", p, without(q, [0])
    yield "with impossible tokens", gapped, other
    yield "equal", p, p
    yield "disjoint", without(p, half), without(q, [v for v in range(vocab) if v not in half])
    yield "almost equal", p, [level * 0.999_999 + 1e-6 / vocab for level in p]
    yield "one-hot", p, most_likely(q)


def random_tree(generator: np.random.Generator, vocab: int, depth: int, cut: float = 0.0) -> Tree:
    """Return Dirichlet laws, peaked and flat. With `cut`, that fraction of the tokens is impossible (never all)."""
    tree = []
    for i in range(depth):
        law = generator.gamma(generator.choice([0.3, 1.0, 3.0], (*[vocab] * i, 1)), size=[vocab] * (i + 1)) + 1e-3
        kept = generator.random(law.shape) >= cut
        law = np.where(kept | ~kept.any(axis=-1, keepdims=True), law, 0.0)
        tree.append(law / law.sum(axis=-1, keepdims=True))
    return tree


def without(tree: Tree, tokens: list[int]) -> Tree:
    """Return the laws conditioned on none of these tokens being drawn."""
    kept = [np.where(np.isin(np.arange(level.shape[-1]), tokens), 0.0, level) for level in tree]
    return [level / level.sum(axis=-1, keepdims=True) for level in kept]


def most_likely(tree: Tree) -> Tree:
    """Return the laws with all mass on the most likely token."""
    return [np.eye(level.shape[-1])[level.argmax(axis=-1)] for level in tree]


def every_draft(vocab: int, k: int) -> np.ndarray:
    """Return all drafts of K tokens, int [V^K, K], in the order of a tree's axes."""
    return np.array(list(itertools.product(range(vocab), repeat=k))).reshape(vocab**k, k)


def every_length(vocab: int, k: int) -> np.ndarray:
    """Return lengths, int [K + 1, V^K]: all drafts at length 0, all at 1, .."""
    return np.repeat(np.arange(k + 1)[:, None], vocab**k, axis=1)


def logs(tree: Tree, drafts: np.ndarray) -> np.ndarray:
    """Return log-probs of each position along each draft, [drafts, len(tree), V]."""
    vocab = tree[0].shape[-1]
    laws = [np.broadcast_to(level[tuple(drafts[:, :i].T)], (len(drafts), vocab)) for i, level in enumerate(tree)]
    with np.errstate(divide="ignore"):
        return np.log(np.stack(laws, axis=1))


def following(p: Tree) -> list[np.ndarray]:
    """Return a list whose entry i is the joint law of positions i, i + 1, .. given the tokens before, over all axes."""
    joint = [np.ones(p[-1].shape)]
    for level in reversed(p):
        joint.insert(0, level.reshape(level.shape + (1,) * (joint[0].ndim - level.ndim)) * joint[0])
    return joint


def chances(drawn: Tree, k: int) -> np.ndarray:
    """Return the probability of each of `every_draft`, float64 [V^K]."""
    return following(drawn[:k])[0].ravel() if k else np.ones(1)


def stops_and_residuals(law_of: LawOf, *rounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the probability that `draw` accepts m tokens, [B, K+1], and of the token after them, [B, K+1, V].

    rounds: (log_p, log_q, draft, length), the arguments of the law.

    Raises AssertionError if `draw` does not draw that token from the law's `residual`.
    """
    with jax.enable_x64(True):
        # `draw` is looked up here, so that an edited one is seen.
        results = _compiled(law_of, verify_law.draw)(*(jnp.asarray(x) for x in rounds))
        stop, residual, follows = processes.fetch(results)
        if not follows.all():
            raise AssertionError("not lossless: `draw` does not draw the token after the accepted ones from `residual`")
        return stop, residual


@cache
def _compiled(law_of: LawOf, draw: Callable[[AcceptLaw, Noise], Verdict]) -> Callable[..., tuple[Array, Array, Array]]:
    @jax.jit
    def of(log_p: Array, log_q: Array, draft: Array, length: Array) -> tuple[Array, Array, Array]:
        law = law_of(log_p, log_q, draft, length)
        law = law._replace(length=law.length.astype(jnp.int32))  # as in a rollout, where integers have 32 bits
        rows, count, vocab = log_p.shape
        # One uniform between each two neighbouring survival probabilities stands for all of them.
        ends = jnp.pad(jnp.sort(jnp.clip(law.survival, 0, 1)), ((0, 0), (1, 1)), constant_values=((0, 0), (0, 1)))
        chance = jnp.diff(ends)
        accepted, follows = jax.vmap(partial(_draw_all, draw, law))((ends[:, 1:] + ends[:, :-1]).T / 2)
        outcomes = jnp.arange(count, dtype=jnp.int32)[None, None] == accepted.T[..., None]
        stop = jnp.sum(jnp.where(outcomes, chance[..., None], 0), axis=1)
        residual = jnp.stack([jnp.exp(law.residual(jnp.full(rows, m, jnp.int32))) for m in range(count)], axis=1)
        return stop, residual, follows.T | (chance == 0)

    return of


def _draw_all(draw: Callable[[AcceptLaw, Noise], Verdict], law: AcceptLaw, uniform: Array) -> tuple[Array, Array]:
    """Return the number that `draw` accepts for these uniforms, [B], and whether the token follows the residual, [B].

    Noise that is minus the residual's log-probs, and slightly more at one token, draws that token if `draw` adds it to
    the same log-probs. Noise is large where the residual has no mass.
    """
    zeros = jnp.zeros_like(law.log_p[:, :1])
    vocabulary = jnp.arange(law.log_p.shape[-1], dtype=jnp.int32)[None]
    accepted = draw(law, Noise(law.log_q, uniform, zeros)).accepted
    left = law.residual(accepted)
    possible = left > -jnp.inf

    def follows(token: Array) -> Array:
        slightly = jnp.where(vocabulary == token, jnp.sqrt(jnp.finfo(left.dtype).eps), 0)
        verdict = draw(law, Noise(law.log_q, uniform, jnp.where(possible, slightly - left, 1e3)[:, None]))
        allowed = jnp.where(possible[:, token][:, None], vocabulary == token, possible)
        drawn = jnp.take_along_axis(allowed, verdict.token[:, None], axis=1)[:, 0]
        return drawn & (verdict.accepted == accepted)

    return accepted, jnp.all(jax.vmap(follows)(vocabulary[0]), axis=0)


def emitted_laws(law_of: LawOf, p: Tree, drawn: Tree, lengths: np.ndarray, verified: Tree | None = None) -> np.ndarray:
    """Return for each row of `lengths` [cases, drafts] the law of the next K + 1 tokens, [cases, V, .., V].

    drawn: law that the drafter samples from. verified: law that it reports. After the token that ends the round, the
    further tokens are sampled from p.
    """
    vocab, k, cases = p[0].shape[0], len(p) - 1, len(lengths)
    drafts = every_draft(vocab, k)
    rounds = logs(p, drafts), logs((verified or drawn)[:k], drafts) if k else np.zeros((1, 0, vocab)), drafts
    stop, residual = stops_and_residuals(law_of, *(np.concatenate([x] * cases) for x in rounds), lengths.ravel())
    if stop[np.arange(k + 1) > lengths.reshape(-1, 1)].any() or not np.isfinite([stop.sum(), residual.sum()]).all():
        raise AssertionError("not lossless: accepts beyond a draft's length, or has a residual that is no law")
    ends = np.tile(chances(drawn, k), cases)[:, None, None] * stop[..., None] * residual
    rest, laws = following(p), np.zeros((cases, vocab ** (k + 1)))
    for m in range(k + 1):
        shape = (vocab**m, vocab, vocab ** (k - m))
        by_prefix = ends[:, m].reshape(cases, vocab**m, -1, vocab).sum(axis=2)
        laws += (by_prefix[..., None] * rest[m + 1].reshape(shape)).reshape(cases, -1)
    return laws.reshape(cases, *[vocab] * (k + 1))


def mean_accepted(law_of: LawOf, p: Tree, q: Tree, length: int) -> float:
    """Return the expected number of accepted tokens of a draft of `length` tokens."""
    vocab, k = p[0].shape[0], len(p) - 1
    drafts = every_draft(vocab, k)
    stop, _ = stops_and_residuals(law_of, logs(p, drafts), logs(q[:k], drafts), drafts, np.full(len(drafts), length))
    return float(chances(q, k) @ stop @ np.arange(k + 1))

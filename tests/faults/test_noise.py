"""Faults of random numbers that samples hardly show: too few random bits, and draws that share noise."""

import itertools
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from specjax import keys as keys_module
from specjax.drafters import Drafter, Proposal
from specjax.keys import Purpose, SeedStep, gumbels, seed_step, sequence_keys
from specjax.rollout import admission
from specjax.rollout.plan import RolloutConfig
from specjax.rollout.speculative import speculative_rollout
from specjax.sampling import SamplingLaw, sample
from specjax.testing import TableDrafter, assert_lossless
from specjax.types import Params, Prompts
from specjax.verify import VERIFIERS, VerifierName
from tests.chain import chain
from tests.tiny import chosen

WORDS = keys_module._words
RARE = 2.0**-12
COMMON_OR_RARE = Params(jnp.log(jnp.array([[1 - RARE, RARE]] * 2)), {})


class Coin(Drafter):
    """Drafter whose tokens all have the same probability."""

    def start(self, params: Params, prompts: Prompts, features: Array, width: int, drafting: object = True) -> Array:
        return jnp.zeros(len(prompts.lengths), jnp.int32)

    def propose(self, params: Params, state: Array, gumbel: Array, law: SamplingLaw) -> tuple[Proposal, Array]:
        log_q = jnp.full_like(gumbel, -np.log(gumbel.shape[-1]))
        return Proposal(sample(log_q, gumbel), log_q, jnp.full_like(state, gumbel.shape[1])), state

    def observe(self, state: Array, features: Array, tokens: Array, emitted: Array) -> Array:
        return state


def cut_to(bits: int | Array, purpose: Purpose) -> Callable[[Array, Array, Purpose, int], tuple[Array, Array]]:
    """Return the function that hashes noise, reduced to `bits` random bits for draws of this purpose."""

    def words(keys: Array, positions: Array, drawn_for: Purpose, count: int) -> tuple[Array, Array]:
        high, low = WORDS(keys, positions, drawn_for, count)
        return ((high >> 24 - bits) << 24 - bits, jnp.zeros_like(low)) if drawn_for == purpose else (high, low)

    return words


@pytest.mark.parametrize(
    ("verifier", "drafter", "k", "purpose", "bits"),
    [
        # Only the rare token, accepted with probability 2^-12, and only the common one, with 1 - 2^-12.
        ("rejection", TableDrafter((1, 1)), 1, Purpose.ACCEPT, 6),
        pytest.param("rejection", TableDrafter((0, 0)), 1, Purpose.ACCEPT, 10, marks=pytest.mark.slow),
        # A rare token and a common one are accepted together, with 2^-10, or not at all.
        pytest.param("block", Coin(), 2, Purpose.ACCEPT, 10, marks=pytest.mark.slow),
        # The policy's own draw must be rare.
        ("coupled", TableDrafter((1, 1)), 1, Purpose.COUPLED, 10),
    ],
    ids=["rejection of rare", "rejection of common", "block", "coupled"],
)
def test_row_24_noise_of_few_bits_changes_the_law(
    verifier: VerifierName, drafter: Drafter, k: int, purpose: Purpose, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RolloutConfig(group_size=2**14, max_new_tokens=k + 1, draft_length=k, verifier=verifier)
    proof = chain(2), drafter, COMMON_OR_RARE, config
    assert_lossless(*proof, draws=2**18)
    monkeypatch.setattr(keys_module, "_words", cut_to(bits, purpose))
    with pytest.raises(AssertionError, match="not lossless"):
        assert_lossless(*proof, draws=2**18)


@partial(jax.jit, static_argnums=0)
def acceptance_uniforms(verifier: VerifierName, bits: Array) -> Array:
    """Return a round's acceptance uniform of 65,536 sequences, with as many random bits."""
    rows = jnp.arange(2**16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys_module, "_words", cut_to(bits, Purpose.ACCEPT))
        keys = sequence_keys(seed_step(0, 0), rows, jnp.zeros_like(rows))
        return VERIFIERS[verifier].noise(keys, rows, 1, 2).uniform


@pytest.mark.parametrize("bits", [6, 16, 23, 24])
@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_row_24_every_acceptance_bit_is_fair(verifier: VerifierName, bits: int) -> None:
    """A bit of which the mean is over six standard deviations off is not random."""
    uniform = np.asarray(acceptance_uniforms(verifier, np.int32(bits)))
    drawn = (uniform * 2**24).astype(np.int32)[:, None] >> np.arange(24)[::-1] & 1
    unfair = np.abs(drawn.mean(axis=0) - 0.5) > 6 * 0.5 / np.sqrt(len(uniform))
    assert unfair.tolist() == [False] * bits + [True] * (24 - bits)


# Coordinates near powers of two, where one could be cut or rounded. Filler prompts have negative ids.
SEEDS = 0, 1, 2**8, 2**16, 2**31 - 1
STEPS = -2, -1, 0, 1, 2**8, 2**16, 2**31 - 1
IDS = -2, -1, 0, 1, 2**8 - 1, 2**8, 2**16 - 1, 2**16, 2**16 + 1, 2**24, 2**24 + 1, 2**31 - 2, 2**31 - 1
SAMPLES = 0, 1, 2, 2**8, 2**16
POSITIONS = 0, 1, 2, 2**8, 2**16, 2**24, 2**24 + 1

NoiseOf = Callable[[Array, Array, Purpose, int], Array]


@partial(jax.jit, static_argnums=0)
def draw(noise_of: NoiseOf, fault: Array, seed: Array, step: Array) -> Array:
    """Return the draws of a seed and step at all other coordinates. fault: index into SHARED_KEYS, traced."""
    ids, samples = (jnp.array(x, jnp.int32) for x in zip(*itertools.product(IDS, SAMPLES), strict=True))
    positions = jnp.tile(jnp.array(POSITIONS), (len(ids), 1))
    *run, ids, samples = jax.lax.switch(fault, [*SHARED_KEYS.values()], seed, step, ids, samples)
    keys = sequence_keys(tuple(run), ids, samples)
    return jnp.stack([noise_of(keys, positions, purpose, 4) for purpose in Purpose])


def shared_draws(fault: str = "none", noise_of: NoiseOf = gumbels) -> int:
    """Return how many draws, as pairs of words, are equal to another one, over all combinations of coordinates."""
    at = np.int32([*SHARED_KEYS].index(fault))
    drawn = [np.asarray(draw(noise_of, at, *np.array(run, np.int32))) for run in itertools.product(SEEDS, STEPS)]
    pairs = np.stack(drawn).reshape(-1, 2).view(np.int64)
    return pairs.size - np.unique(pairs).size


def as_float(x: Array) -> Array:
    return x.astype(jnp.float32).astype(jnp.int32)


# seed, step, ids, samples -> faulty ones.
SHARED_KEYS: dict[str, Callable[..., tuple[Array, Array, Array, Array]]] = {
    "none": lambda *coordinates: coordinates,
    "8 bits": lambda seed, step, ids, n: (seed, step, ids & 0xFF, n),
    "16 bits": lambda seed, step, ids, n: (seed, step, ids & 0xFFFF, n),
    "24 bits": lambda seed, step, ids, n: (seed, step, ids & 0xFFFFFF, n),
    "float ids": lambda seed, step, ids, n: (seed, step, as_float(ids), n),
    "abs": lambda seed, step, ids, n: (seed, step, jnp.abs(ids), n),
    "max": lambda seed, step, ids, n: (seed, step, jnp.maximum(ids, 0), n),
    "sum": lambda seed, step, ids, n: (seed, step, ids + n, 0 * n),
    "samples": lambda seed, step, ids, n: (seed, step, ids, n & 0xFF),
    "steps": lambda seed, step, ids, n: (seed, step & 0xFF, ids, n),
    "seeds": lambda seed, step, ids, n: (seed & 0xFFFF, step, ids, n),
    "seed and step": lambda seed, step, ids, n: (seed + step, 0 * step, ids, n),
}


@pytest.mark.parametrize("fault", SHARED_KEYS)
def test_row_25_draws_share_noise_only_if_their_keys_do(fault: str) -> None:
    assert (shared_draws(fault) > 0) == (fault != "none")


@pytest.mark.parametrize(
    "noise_of",
    [
        lambda keys, at, purpose, count: gumbels(keys, at & 0xFF, purpose, count),
        lambda keys, at, purpose, count: gumbels(keys, as_float(at), purpose, count),
        lambda keys, at, purpose, count: gumbels(keys, at, Purpose(purpose & 1), count),
        lambda keys, at, purpose, count: gumbels(keys, at + purpose, Purpose.DRAFT, count),
        lambda keys, at, purpose, count: jnp.tile(gumbels(keys, at, purpose, count // 2), 2),
        lambda keys, at, purpose, count: gumbels(keys[:, :1] + jnp.zeros((1, 2), jnp.uint32), at * 0, purpose, count),
    ],
    ids=["8 bits", "float positions", "purposes", "purpose in position", "indices", "no position"],
)
def test_row_25_draws_that_share_a_counter_are_detected(noise_of: NoiseOf) -> None:
    assert shared_draws(noise_of=noise_of) > 0


# run, ids, samples -> keys.
KEYS: dict[str, Callable[[SeedStep, Array, Array], Array]] = {
    "none": sequence_keys,
    "ids of 8 bits": lambda run, ids, samples: sequence_keys(run, ids & 0xFF, samples),
    "no step": lambda run, ids, samples: sequence_keys((run[0], 0 * run[1]), ids, samples),
    "keys by row": lambda run, ids, samples: sequence_keys(run, ids, jnp.arange(len(samples))),
}


@jax.jit
def completions(verifier: Array, fault: Array, run: SeedStep) -> Array:
    """Return completions of one prompt, for many ids and samples. Sequences wait for slots.

    verifier, fault: indices into VERIFIERS and KEYS, traced, so that one program holds all of them.
    """
    options = dict(max_new_tokens=16, draft_length=2, phases=((6, 17),), admit=2)
    config = RolloutConfig(3, verifier=chosen(verifier), **options)
    prompts = Prompts(jnp.zeros((len(IDS), 1), jnp.int32), jnp.ones(len(IDS), jnp.int32), jnp.array(IDS, jnp.int32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission, "sequence_keys", partial(jax.lax.switch, fault, [*KEYS.values()]))
        return speculative_rollout(chain(16), Coin(), Params(jnp.zeros((16, 16)), {}), prompts, run, config).tokens


@pytest.mark.parametrize(
    ("verifier", "fault"),
    [
        *((verifier, "none") for verifier in VERIFIERS),
        ("rejection", "ids of 8 bits"),
        ("block", "no step"),
        ("coupled", "keys by row"),
        ("coupled", "ids of 8 bits"),
    ],
)
def test_row_25_completions_share_noise_only_if_their_keys_do(verifier: VerifierName, fault: str) -> None:
    """Two completions of 16 tokens are equal with probability 2^-64."""
    at = np.array([[*VERIFIERS].index(verifier), [*KEYS].index(fault)], np.int32)
    tokens = np.concatenate([completions(*at, seed_step(*x)) for x in itertools.product(SEEDS, STEPS[1:4])])
    assert (len(np.unique(tokens, axis=0)) < len(tokens)) == (fault != "none")

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry2x32_p
from scipy import stats

import specjax.keys as keys_module
from specjax.keys import Purpose, gumbels, seed_step, sequence_keys, threefry, uniforms
from specjax.verify import VERIFIERS, Noise
from tests.refusals import refuses

IDS, SAMPLES = np.array([5, 5, 9, 9]), np.array([0, 1, 0, 1])

sequences = jax.jit(sequence_keys)
draws = jax.jit(gumbels, static_argnums=(2, 3))


@functools.partial(jax.jit, static_argnums=0)
def round_noise(verifier: str, keys: jax.Array, start: jax.Array) -> Noise:
    return VERIFIERS[verifier].noise(keys, start, 3, 5)


def test_the_hash_is_that_of_jax():
    keys = jax.random.split(jax.random.key(3), 5)
    data = np.array([0, 1, 2**31, 77, 2**32 - 1], np.uint32)
    theirs = jax.random.key_data(jax.jit(jax.vmap(jax.random.fold_in))(keys, data))
    one, two = jax.random.key_data(keys).T
    ours = np.stack(jax.jit(threefry)(one, two, np.zeros_like(data), data), axis=1)
    np.testing.assert_array_equal(ours, theirs)
    both = jax.jit(threefry)(one, two, data, data[::-1])
    expected = threefry2x32_p.bind(one, two, jnp.asarray(data), jnp.asarray(data[::-1]))
    np.testing.assert_array_equal(both, expected)


def test_coupled_noise_is_a_function_of_sequence_and_position_for_drafter_and_verifier():
    keys = sequences(seed_step(0, 0), IDS, SAMPLES)
    whole = draws(keys, np.tile(np.arange(9), (4, 1)), Purpose.COUPLED, 5)
    start = np.array([0, 1, 4, 5])
    part = round_noise("coupled", keys, start)
    for row, at in enumerate(start.tolist()):
        np.testing.assert_array_equal(part.emit[row], whole[row, at : at + 4])
    np.testing.assert_array_equal(part.draft, part.emit[:, :3])


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_the_noise_of_a_row_does_not_depend_on_its_neighbours(verifier: str):
    keys, start = sequences(seed_step(0, 0), IDS, SAMPLES), np.array([2, 3, 4, 9])
    order = np.array([3, 0, 2])
    whole, own = round_noise(verifier, keys, start), sequences(seed_step(0, 0), IDS[order], SAMPLES[order])
    for all_rows, some in zip(whole, round_noise(verifier, own, start[order]), strict=True):
        np.testing.assert_array_equal(some, all_rows[order])


def test_rejection_uses_new_noise_in_each_round():
    """Successive rounds overlap in positions, but must share no noise."""
    keys = sequences(seed_step(0, 0), IDS[:1], SAMPLES[:1])
    drawn = [round_noise("rejection", keys, np.array([start])) for start in (4, 5, 6, 7, 8)]
    values = np.concatenate([np.concatenate([np.ravel(x) for x in noise]) for noise in drawn])
    assert len(np.unique(values)) == len(values) == 5 * (3 * 5 + 1 + 5)


def test_gumbels_follow_their_distribution_including_its_tail():
    keys = sequences(seed_step(0, 0), IDS[:1], SAMPLES[:1])
    noise = np.ravel(draws(keys, np.array([3]), Purpose.DRAFT, 1 << 21))
    assert noise.dtype == np.float32
    assert np.isfinite(noise).all()
    assert stats.kstest(noise[:100_000], "gumbel_r").pvalue > 1e-3
    # If uniforms were multiples of 2^-24, about 760 values would remain here, and 95 draws would have several ties.
    tail = noise[noise > 10]
    assert len(tail) > 50
    assert len(np.unique(tail)) == len(tail)


def test_the_words_that_hash_to_the_ends_give_finite_noise(monkeypatch: pytest.MonkeyPatch):
    """These words are all ones and all zeros, which 2^-48 of all draws hit."""
    for word, low, high in (0, 30, 40), (2**32 - 1, -3, -2):
        monkeypatch.setattr(keys_module, "threefry", lambda *x, word=word: (jnp.full((1, 1), word, jnp.uint32),) * 2)
        key, position = jnp.zeros((1, 2), jnp.uint32), jnp.array([0])
        assert low < gumbels(key, position, Purpose.DRAFT, 1)[0, 0] < high
        assert 0 <= uniforms(key, position, Purpose.ACCEPT)[0] < 1


def test_uniforms_are_uniform():
    keys = sequences(seed_step(0, 0), np.arange(100_000), np.zeros(100_000, np.int32))
    drawn = np.asarray(jax.jit(uniforms, static_argnums=2)(keys, np.arange(100_000), Purpose.ACCEPT))
    assert stats.kstest(drawn, "uniform").pvalue > 1e-3


def test_more_draws_than_indices_are_refused():
    with refuses("must be less than 2"):
        gumbels(jnp.zeros((1, 2), jnp.uint32), jnp.array([0]), Purpose.DRAFT, 2**30)

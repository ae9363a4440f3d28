import functools

import jax
import numpy as np
import pytest
from scipy import stats

from specjax.keys import Purpose, coupled_gumbel, gumbel, round_keys, seed_step, sequence_keys
from specjax.verify import VERIFIERS, Noise

IDS, SAMPLES = np.array([5, 5, 9, 9]), np.array([0, 1, 0, 1])

sequences = jax.jit(sequence_keys)
coupled = jax.jit(coupled_gumbel, static_argnums=(2, 3))


@functools.partial(jax.jit, static_argnums=0)
def round_noise(verifier: str, keys: jax.Array, start: jax.Array) -> Noise:
    return VERIFIERS[verifier].noise(keys, start, 3, 5)


def bits(keys: jax.Array) -> np.ndarray:
    return np.asarray(jax.random.key_data(keys))


def test_every_coordinate_of_a_draw_changes_its_key():
    runs = [seed_step(seed, step) for seed in (0, 1) for step in (0, 1)]
    keys = np.concatenate([bits(sequences(run, IDS, SAMPLES)) for run in runs])
    assert len(np.unique(keys, axis=0)) == 16

    fold = jax.jit(round_keys, static_argnums=2)
    keys = sequences(seed_step(0, 0), IDS, SAMPLES)
    rounds = [bits(fold(keys, np.full(4, start), use)) for start in (0, 1, 2) for use in Purpose]
    assert len(np.unique(np.concatenate(rounds), axis=0)) == 4 * 3 * len(Purpose)


def test_sequence_keys_do_not_depend_on_the_batch():
    keys = bits(sequences(seed_step(3, 4), IDS, SAMPLES))
    order = np.array([2, 0, 3])
    np.testing.assert_array_equal(bits(sequences(seed_step(3, 4), IDS[order], SAMPLES[order])), keys[order])


def test_coupled_noise_is_a_function_of_sequence_and_position():
    keys = sequences(seed_step(0, 0), IDS, SAMPLES)
    whole = coupled(keys, np.zeros(4, np.int32), 9, 5)
    start = np.array([0, 1, 4, 6])
    part = coupled(keys, start, 3, 5)
    for row, at in enumerate(start.tolist()):
        np.testing.assert_array_equal(part[row], whole[row, at : at + 3])
    assert len(np.unique(whole.reshape(-1, 5), axis=0)) == 4 * 9


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_the_noise_of_a_row_does_not_depend_on_its_neighbours(verifier: str):
    keys, start = sequences(seed_step(0, 0), IDS, SAMPLES), np.array([2, 3, 4, 9])
    order = np.array([3, 0, 2])
    whole = round_noise(verifier, keys, start)
    for all_rows, some in zip(whole, round_noise(verifier, keys[order], start[order]), strict=True):
        np.testing.assert_array_equal(some, all_rows[order])


def test_rejection_draws_everything_anew_each_round():
    """Successive rounds overlap in positions; none of their noise may."""
    keys = sequences(seed_step(0, 0), IDS[:1], SAMPLES[:1])
    drawn = [round_noise("rejection", keys, np.array([start])) for start in (4, 5, 6, 7, 8)]
    values = np.concatenate([np.concatenate([np.ravel(x) for x in noise]) for noise in drawn])
    assert len(np.unique(values)) == len(values) == 5 * (3 * 5 + 1 + 5)


def test_coupled_drafter_and_verifier_share_the_noise_of_a_position():
    keys = sequences(seed_step(0, 0), IDS, SAMPLES)
    noise = round_noise("coupled", keys, np.array([1, 2, 3, 4]))
    np.testing.assert_array_equal(noise.draft, noise.emit[:, :3])


def test_gumbels_follow_their_law_and_resolve_its_tail():
    noise = np.asarray(jax.jit(lambda key: gumbel(key, (1 << 21,)))(jax.random.key(0)))
    assert noise.dtype == np.float32
    assert stats.kstest(noise[:100_000], "gumbel_r").pvalue > 1e-3
    # Uniforms that are multiples of 2^-23 would leave some 380 values here, and a dozen ties among 95 draws.
    tail = noise[noise > 10]
    assert len(tail) > 50
    assert len(np.unique(tail)) == len(tail)

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from specjax.keys import Purpose, gumbels
from specjax.sampling import SamplingLaw, _highest, full_log_probs, pick, process_logits, sample
from specjax.testing.hlo import Program
from tests.specjax.training import mesh_of

LAWS = [
    SamplingLaw(),
    SamplingLaw(temperature=0.7),
    SamplingLaw(temperature=0.0),
    SamplingLaw(top_k=1),
    SamplingLaw(top_k=3),
    SamplingLaw(top_k=1000),
    SamplingLaw(top_p=0.8),
    SamplingLaw(top_p=1e-6),
    SamplingLaw(min_p=0.2),
    SamplingLaw(min_p=1.0),
    SamplingLaw(temperature=1.7, top_k=5, top_p=0.7),
    SamplingLaw(temperature=0.6, top_p=0.9, min_p=0.1),
    SamplingLaw(temperature=1.3, top_k=4, top_p=0.95, min_p=0.25),
]


def float64_law(logits: np.ndarray, law: SamplingLaw) -> np.ndarray:
    """Return the probabilities at one position, without the code under test."""
    if law.temperature == 0:
        return np.eye(len(logits))[np.argmax(logits)]
    p = np.exp((logits - logits.max()) / np.float64(law.temperature))
    p /= p.sum()
    if law.top_k is not None:
        p = _keep(p, p >= np.sort(p)[::-1][min(law.top_k, len(p)) - 1])
    if law.top_p < 1:
        kept, mass = 0.0, 0.0
        for kept in np.sort(p)[::-1]:
            mass += kept
            if mass >= law.top_p:
                break
        p = _keep(p, p >= kept)
    return _keep(p, p >= law.min_p * p.max())


def _keep(p: np.ndarray, kept: np.ndarray) -> np.ndarray:
    p = np.where(kept, p, 0.0)
    return p / p.sum()


def rows_of_logits() -> np.ndarray:
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(200, 11)) * generator.uniform(0.1, 8, size=(200, 1))
    rows[20:60] = np.round(rows[20:60])
    rows[60] = 0.0
    rows[61] = np.eye(11)[4] * 50
    rows[62:80, 3:7] = -np.inf
    return rows.astype(np.float32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("law", LAWS, ids=str)
def test_law_matches_float64(law: SamplingLaw, dtype: type):
    """Logits are random, tied, constant, one-hot or partly -inf. Of equal logits `top_k` keeps all, greedy one."""
    logits = jnp.asarray(rows_of_logits(), dtype)
    log_p = np.asarray(jax.jit(process_logits, static_argnums=1)(logits, law))
    expected = np.stack([float64_law(row, law) for row in np.asarray(logits).astype(np.float64)])
    np.testing.assert_array_equal(log_p > -np.inf, expected > 0)
    np.testing.assert_allclose(np.exp(log_p), expected, atol=2e-6)
    np.testing.assert_allclose(np.exp(log_p.astype(np.float64)).sum(-1), 1, atol=1e-5)
    assert log_p.dtype == full_log_probs(logits, law).dtype == np.float32


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_kth_token_is_found_among_all_numbers(dtype: type):
    """Numbers range from the largest to the smallest of both signs, with zeros and infinities."""
    most, least = float(jnp.finfo(dtype).max), float(jnp.finfo(dtype).tiny)
    ordered = [jnp.inf, most, 2.0, 1.0, 0.5, least, 0.0, -least, -1.0, -1.5, -most, -jnp.inf]
    logits = jnp.asarray(np.random.default_rng(0).permutation(ordered), dtype)

    @jax.jit
    def threshold(k: jax.Array) -> jax.Array:
        return _highest(lambda at: jnp.sum(logits >= at, keepdims=True) >= k, logits, jnp.min(logits)[None])

    for k in range(1, len(ordered)):
        np.testing.assert_array_equal(threshold(np.int32(k)), np.asarray(ordered[k - 1 : k], dtype))


@pytest.mark.parametrize("law", [LAWS[0], LAWS[2], LAWS[-1]], ids=str)
def test_the_law_needs_little_temporary_memory(law: SamplingLaw):
    """Besides logits and law, at most two arrays of that size exist, and no sorted one."""
    shape = (8, 4, 4096)
    analysis = jax.jit(lambda x: process_logits(x, law)).lower(jnp.zeros(shape)).compile().memory_analysis()
    assert analysis.temp_size_in_bytes < 2.1 * 4 * np.prod(shape)


@pytest.mark.parametrize("law", [SamplingLaw(0.7, top_k=4), SamplingLaw(0.7, top_p=0.9), SamplingLaw(0.7, min_p=0.1)])
def test_the_cut_is_consistent_if_the_compiler_rounds_twice(law: SamplingLaw):
    """If XLA computes the cut twice with other rounding, the token at the border is still in or out consistently."""
    compiled = jax.jit(lambda x: process_logits(x, law))
    for seed in range(20):
        logits = np.random.default_rng(seed).normal(size=(24, 1, 23)).astype(np.float32) * 3
        log_p = np.asarray(compiled(logits), np.float64)
        np.testing.assert_allclose(np.exp(log_p).sum(axis=-1), 1, atol=1e-5)


@pytest.mark.parametrize("law", [SamplingLaw(0.7, top_k=4), SamplingLaw(0.7, top_p=0.9)], ids=str)
def test_a_sharded_vocabulary_is_cut_in_the_same_way(law: SamplingLaw):
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(24, 64)).astype(np.float32) * 3)
    spread = jax.device_put(logits, NamedSharding(mesh_of(1, 1, 8), P(None, "tensor")))
    whole, parts = (np.asarray(jax.jit(process_logits, static_argnums=1)(x, law)) for x in (logits, spread))
    with jax.set_mesh(mesh_of(1, 1, 8)):
        gathered = jax.jit(process_logits, static_argnums=1)(spread, law)
    assert gathered.sharding.is_fully_replicated
    np.testing.assert_array_equal(gathered, whole)
    np.testing.assert_array_equal(parts > -np.inf, whole > -np.inf)
    np.testing.assert_allclose(np.exp(parts), np.exp(whole), atol=1e-6)


def test_truncation_keeps_the_right_tokens():
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))

    def support(**options: float) -> list[int]:
        log_p = jax.jit(process_logits, static_argnums=1)(logits, SamplingLaw(**options))
        return np.flatnonzero(np.asarray(log_p) > -np.inf).tolist()

    assert support() == [0, 1, 2, 3]
    assert support(top_k=2) == [0, 1]
    assert support(top_p=0.69) == [0, 1]
    assert support(top_p=0.71) == [0, 1, 2]
    assert support(min_p=0.45) == [0, 1, 2]
    # After top-k and renormalisation, the nucleus of 0.55 is only the first token, with 0.4 / 0.7 of the mass.
    assert support(top_k=2, top_p=0.55) == [0]
    # The temperature applies before the nucleus is computed.
    assert support(temperature=0.5, top_p=0.5) == [0]
    assert support(temperature=1.0, top_p=0.5) == [0, 1]


def test_top_k_keeps_equal_logits_and_greedy_takes_the_first():
    kept = process_logits(jnp.array([2.0, 1.0, 1.0, 1.0, 0.0]), SamplingLaw(top_k=2)) > -jnp.inf
    np.testing.assert_array_equal(kept, [True, True, True, True, False])
    greedy = process_logits(jnp.array([0.0, 3.0, 3.0]), SamplingLaw(temperature=0.0))
    np.testing.assert_array_equal(greedy, [-jnp.inf, 0.0, -jnp.inf])


def test_full_log_probs_divide_by_the_temperature_once_and_ignore_truncation():
    logits = np.array([1.0, 0.0, -2.0])
    cut = SamplingLaw(temperature=0.7, top_k=1, top_p=0.5, min_p=0.5)
    for law, temperature in ((cut, 0.7), (SamplingLaw(temperature=0.0), 1.0)):
        weights = np.exp(logits / temperature)
        found = full_log_probs(jnp.asarray(logits, jnp.float32), law)
        np.testing.assert_allclose(found, np.log(weights / weights.sum()), rtol=1e-6)


def test_sample_adds_noise_and_never_leaves_the_support():
    log_p = jnp.log(jnp.array([[0.5, 0.5, 0.0], [0.1, 0.9, 0.0]]))
    noise = jnp.array([[1.0, 2.0, 1e9], [3.0, 0.0, 1e9]])
    tokens = sample(log_p, noise)
    np.testing.assert_array_equal(tokens, [1, 0])
    assert tokens.dtype == jnp.int32
    np.testing.assert_array_equal(pick(log_p, tokens), [log_p[0, 1], log_p[1, 0]])


def test_the_first_of_equal_maxima_is_drawn():
    even, noise = jnp.zeros((3, 4)), jnp.array([[0.0, 2.0, 1.0, 2.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0]])
    np.testing.assert_array_equal(jax.jit(sample)(even, noise), [1, 0, 3])


def test_on_cpu_noise_is_computed_before_the_argmax():
    def draw(log_p: jax.Array, keys: jax.Array, positions: jax.Array) -> jax.Array:
        return sample(log_p, gumbels(keys, positions, Purpose.RESIDUAL, 4096))

    shapes = [jax.ShapeDtypeStruct(*x) for x in (((2, 4096), "float32"), ((2, 2), "uint32"), ((2,), "int32"))]
    program = Program(jax.jit(draw).lower(*shapes).compile().as_text())
    lines = [line for computation in program.computations.values() for line in computation]
    noisy = {line.computation for line in lines if line.opcode == "log-plus-one"}
    searching = {line.computation for line in lines if line.opcode == "reduce" and len(line.arrays) > 1}
    assert noisy and searching and not noisy & searching


def test_the_gradient_of_a_picked_log_prob_is_that_of_a_gather_and_scatters_nothing():
    """Bit for bit. Scattered into zeros, float32 of a microbatch's logits would be written twice."""
    logits, tokens = jax.random.normal(jax.random.key(0), (3, 5, 7)), jnp.arange(15, dtype=jnp.int32).reshape(3, 5) % 7

    def gradient(pick: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
        return jax.jit(jax.grad(lambda logits: jnp.sum(jnp.sin(pick(jax.nn.log_softmax(logits), tokens)))))

    gathered = gradient(lambda log_p, tokens: jnp.take_along_axis(log_p, tokens[..., None], axis=-1)[..., 0])
    assert np.array_equal(gradient(pick)(logits), gathered(logits))
    programs = [gradient_of.lower(logits).as_text() for gradient_of in (gradient(pick), gathered)]
    assert ["scatter" in program for program in programs] == [False, True]

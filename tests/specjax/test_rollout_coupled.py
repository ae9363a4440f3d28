"""`coupled` and greedy rollouts in float32: the same tokens with any drafter, any draft and in any slot."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.keys import Purpose, SeedStep, gumbels, seed_step, sequence_keys
from specjax.rollout.plan import RolloutConfig
from specjax.sampling import SamplingLaw
from specjax.types import Prompts, Rollout
from tests.tiny import WANDERING as WORLD
from tests.tiny import assert_same

GROUP, BUDGET, RUN = 4, 12, seed_step(3, 5)
LENGTHS = [*(pytest.param(k, marks=pytest.mark.slow) for k in (1, 2, 3)), 4]
DRAFTS = [("eagle3", "random", 0), ("eagle3", "random", 1), ("policy", "identical", 0), ("policy", "adversarial", 0)]


BASE = RolloutConfig(group_size=GROUP, max_new_tokens=BUDGET, draft_length=0, stop_tokens=WORLD.stops)
BASE = replace(BASE, stop_strings=WORLD.stop_strings)


def config(k: int, verifier: str = "coupled", temperature: float = 0.8) -> RolloutConfig:
    return replace(BASE, draft_length=k, verifier=verifier, law=SamplingLaw(temperature))


@pytest.fixture(scope="module")
def plain() -> Rollout:
    return WORLD.rollout("none", "none", config(0), RUN)


@pytest.fixture(scope="module")
def greedy() -> Rollout:
    return WORLD.rollout("none", "none", config(0, "rejection", 0.0), RUN)


def test_the_rollouts_have_something_to_compare(plain: Rollout, greedy: Rollout):
    """Samples differ. Some stop at once, some later, some reach the budget; several stop tokens and strings occur."""
    tokens, lengths, stopped = (np.asarray(x) for x in (plain.tokens, plain.lengths, plain.stopped))
    assert len(np.unique(tokens, axis=0)) > 0.9 * len(tokens)
    assert {1, BUDGET} < set(lengths.tolist())
    last = tokens[np.arange(len(tokens)), lengths - 1]
    completions = [row[:length] for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True)]
    by_string = np.array([WORLD.ends(tokens) for tokens in completions])
    assert not any(WORLD.ends(tokens[:-1]) for tokens in completions)
    np.testing.assert_array_equal(stopped, by_string | np.isin(last, WORLD.stops))
    assert len(set(last[stopped & ~by_string].tolist())) > 1 and by_string.sum() > 3
    assert not stopped[lengths == BUDGET].all()
    assert len(np.unique(greedy.tokens, axis=0)) > 3


def test_every_token_is_the_draw_of_its_sequence_and_position(plain: Rollout):
    """It is the argmax of the policy's log-probs plus the noise of the token's own position."""

    @jax.jit
    def noise_of(batch: Prompts, run: SeedStep) -> jax.Array:
        ids, starts = (jnp.repeat(x, GROUP) for x in (batch.id, batch.lengths))
        keys = sequence_keys(run, ids, jnp.tile(jnp.arange(GROUP), len(batch.id)))
        return gumbels(keys, starts[:, None] + jnp.arange(BUDGET)[None], Purpose.COUPLED, WORLD.vocab)

    noise = np.asarray(noise_of(WORLD.batch, RUN))
    for row, (length, tokens) in enumerate(zip(plain.lengths.tolist(), np.asarray(plain.tokens), strict=True)):
        logits = WORLD.completion_logits(row // GROUP, tokens)
        drawn = (logits / 0.8 + noise[row]).argmax(axis=-1)
        np.testing.assert_array_equal(tokens[:length], drawn[:length])


@pytest.mark.parametrize("verifier, temperature", [("coupled", 0.8), ("rejection", 0.0)])
@pytest.mark.parametrize("k", LENGTHS)
def test_tokens_do_not_depend_on_the_draft(plain: Rollout, greedy: Rollout, k: int, verifier: str, temperature: float):
    """The drafts differ in what is accepted."""
    options, expected = config(k, verifier, temperature), plain if temperature else greedy
    rollouts = [WORLD.rollout(drafter, params, options, RUN, seed) for drafter, params, seed in DRAFTS]
    for rollout in rollouts:
        assert_same(rollout, expected)
    rounds = [int(np.sum(rollout.row_rounds)) for rollout in rollouts]
    if temperature and k == 4:
        assert rounds[2] < 0.4 * min(rounds[0], rounds[1], rounds[3])
        assert len(set(rounds)) == len(rounds) and max(rounds) <= int(np.sum(plain.row_rounds))


@pytest.mark.parametrize(
    "drafter, draft, k",
    [
        ("eagle3 reduced", "random reduced", 2),
        ("mtp", "random mtp", 3),
        ("dspark reduced", "random dspark reduced", 4),
        ("dflash", "random dflash", 2),
        pytest.param("either", "random", 2, marks=pytest.mark.slow),
        pytest.param("model", "stranger", 2, marks=pytest.mark.slow),
    ],
)
def test_coupled_tokens_do_not_depend_on_the_kind_of_draft(plain: Rollout, drafter: str, draft: str, k: int):
    rollout = WORLD.rollout(drafter, draft, config(k), RUN)
    assert_same(rollout, plain)
    assert np.sum(rollout.accepted) > 0


@pytest.mark.parametrize(
    "verifier, drafter, k, temperature",
    [
        ("coupled", "none", 0, 0.8),
        ("coupled", "eagle3", 4, 0.8),
        ("rejection", "eagle3", 4, 0.8),
        ("rejection", "eagle3", 4, 0.0),
    ],
)
def test_tokens_do_not_depend_on_the_slot_order(verifier: str, drafter: str, k: int, temperature: float):
    program = WORLD.program(drafter, config(k, verifier, temperature))
    params = WORLD.params("random" if k else "none")
    order = np.array([3, 0, 5, 1, 4, 2])
    permuted: Prompts = jax.tree.map(lambda x: x[order], WORLD.batch)
    rows = (order[:, None] * GROUP + np.arange(GROUP)).ravel()
    rollout = program(params, WORLD.batch, RUN)
    assert_same(program(params, permuted, RUN), jax.tree.map(lambda x: x[rows] if len(x) == len(rows) else x, rollout))


def test_greedy_tokens_are_the_most_likely_ones_whatever_the_verifier(greedy: Rollout):
    assert_same(WORLD.rollout("eagle3", "random", config(3, "coupled", 0.0), RUN), greedy)
    for row, (length, tokens) in enumerate(zip(greedy.lengths.tolist(), np.asarray(greedy.tokens), strict=True)):
        best = WORLD.completion_logits(row // GROUP, tokens).argmax(axis=-1)
        np.testing.assert_array_equal(tokens[:length], best[:length])

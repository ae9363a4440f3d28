"""Rollouts that draft from known texts, and with a small model: no token changes, and what is accepted is replayed."""

import functools
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafters import HistoryDrafter, NGramDrafter
from specjax.keys import seed_step
from specjax.plan import ChosenConfig, RolloutConfig
from specjax.rollout import speculative_rollout
from specjax.sampling import SamplingLaw
from specjax.types import Params, Prompts, Rollout
from tests.specjax.test_lookup import searched
from tests.tiny import WANDERING as WORLD
from tests.tiny import light_jit

GROUP, BUDGET, RUN = 4, 16, seed_step(3, 5)
CONFIG = RolloutConfig(
    group_size=GROUP, max_new_tokens=BUDGET, draft_length=0, verifier="coupled", stop_tokens=WORLD.stops
)
GREEDY = replace(CONFIG, verifier="rejection", law=SamplingLaw(temperature=0.0), stop_tokens=())
DRAFTS = {"ngram": "none", "history": "remembered", "either": "random", "model": "stranger"}


@pytest.fixture(scope="module")
def plain() -> Rollout:
    return WORLD.rollout("none", "none", CONFIG, RUN)


@pytest.fixture(scope="module")
def greedy() -> Rollout:
    return WORLD.rollout("none", "none", GREEDY, RUN)


@functools.cache
def phased(drafter: str) -> Callable[[list[int]], Rollout]:
    """Rollouts through a queue, in windows that grow and slots that shrink; each phase drafts nothing or 3 tokens."""
    longest = WORLD.batch.tokens.shape[1] + BUDGET
    options = replace(CONFIG, draft_lengths=(0, 3), phases=((12, 11), (12, longest), (5, longest)))

    @light_jit
    def program(params: Params, prompts: Prompts, chosen: jax.Array) -> Rollout:
        every = ChosenConfig(**vars(options), chosen=chosen)
        return speculative_rollout(WORLD.policy, WORLD.drafters[drafter], params, prompts, RUN, every)

    return lambda chosen: program(WORLD.params(DRAFTS[drafter]), WORLD.batch, jnp.array(chosen))


@pytest.mark.parametrize("drafter", DRAFTS)
def test_no_token_depends_on_the_draft(plain: Rollout, drafter: str):
    """Nor where drafting begins late, ends and begins again, behind tokens that the drafter was not told of."""
    drafted = []
    for chosen in ([1, 1, 1], [0, 1, 1], [1, 0, 1]):
        rollout = phased(drafter)(chosen)
        np.testing.assert_array_equal(rollout.tokens, plain.tokens)
        np.testing.assert_array_equal(rollout.lengths, plain.lengths)
        np.testing.assert_allclose(rollout.law, plain.law, atol=1e-4)
        drafted.append(int(np.sum(rollout.drafted)))
        assert np.sum(rollout.accepted) > 0
    assert 0 < max(drafted[1:]) < drafted[0]


def replayed(prompt: list[int], completion: list[int], k: int) -> tuple[list[int], list[int]]:
    """How often position 1 .. k of an n-gram's proposal could be emitted, and was, in a row of these tokens."""
    drafted, accepted, row, at = [0] * k, [0] * k, prompt + completion, len(prompt) + 1
    while at < len(row):
        proposal = searched([row[:at]], row[:at], 1, 4, k)[1]
        kept = 0
        for i, token in enumerate(proposal):
            if at + i < len(prompt) + BUDGET and not set(proposal[:i]) & set(WORLD.stops):
                drafted[i] += 1
            if kept == i and at + i < len(row) and token == row[at + i]:
                kept += 1
                accepted[i] += 1
        at += kept + 1
    return drafted, accepted


def test_ngrams_are_accepted_as_often_as_a_replay_says(plain: Rollout):
    rollout = phased("ngram")([1, 1, 1])
    completions = [row[:n] for row, n in zip(plain.tokens.tolist(), plain.lengths.tolist(), strict=True)]
    expected = [replayed(list(WORLD.prompts[i // GROUP]), row, 3) for i, row in enumerate(completions)]
    np.testing.assert_array_equal(rollout.drafted, [drafted for drafted, _ in expected])
    np.testing.assert_array_equal(rollout.accepted, [accepted for _, accepted in expected])


def run(drafter: NGramDrafter | HistoryDrafter, params: Params, config: RolloutConfig) -> Rollout:
    return light_jit(lambda: speculative_rollout(WORLD.policy, drafter, params, WORLD.batch, RUN, config))()


def test_ngrams_pay_where_a_policy_repeats_itself(greedy: Rollout):
    """A round emits more than one token of a greedy policy, which ends in a loop."""
    rollout = run(NGramDrafter(WORLD.vocab, min_n=1), WORLD.params("none"), replace(GREEDY, draft_length=3))
    np.testing.assert_array_equal(rollout.tokens, greedy.tokens)
    assert np.sum(rollout.lengths - 1) > 1.5 * np.sum(rollout.rounds)


def test_a_greedy_policy_says_what_it_said_the_epoch_before(greedy: Rollout):
    """All of it is drafted and accepted, from the first round on."""
    drafter = HistoryDrafter(WORLD.vocab, min_n=1, max_n=24, siblings=0, offset=3)
    memory = drafter.remember(drafter.blank_memory(1000, BUDGET), WORLD.batch, greedy)
    params = replace(WORLD.params("none"), memory=memory)
    rollout = run(drafter, params, replace(GREEDY, draft_length=3))
    np.testing.assert_array_equal(rollout.tokens, greedy.tokens)
    np.testing.assert_array_equal(rollout.accepted, rollout.drafted)
    np.testing.assert_array_equal(rollout.rounds, -(-(np.asarray(greedy.lengths) - 1) // 4))


def test_a_model_that_is_the_policy_drafts_what_it_says(greedy: Rollout):
    rollout = WORLD.rollout("model", "twin", replace(GREEDY, draft_length=3), RUN)
    np.testing.assert_array_equal(rollout.tokens, greedy.tokens)
    np.testing.assert_array_equal(rollout.accepted, rollout.drafted)
    np.testing.assert_array_equal(rollout.rounds, -(-(np.asarray(greedy.lengths) - 1) // 4))

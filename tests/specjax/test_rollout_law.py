"""Whole rollouts, sampled many thousand times, against the exact law of every completion."""

import functools

import numpy as np
import pytest

from specjax.keys import seed_step
from specjax.rollout import RolloutConfig
from specjax.sampling import SamplingLaw
from specjax.types import Rollout
from tests.exact import LEVEL, Cells, Fit, completion_law, count_completions, fit
from tests.tiny import ENUMERABLE as WORLD

BUDGET, DRAWS = 5, 90_000
LAWS = {
    "temperature 1": SamplingLaw(),
    "temperature 0.7": SamplingLaw(temperature=0.7),
    "top-k": SamplingLaw(top_k=3),
    "top-p": SamplingLaw(temperature=0.7, top_p=0.9),
}
DRAFTERS = {
    "trained": "eagle3",
    "random": "eagle3",
    "random reduced": "eagle3 reduced",
    "adversarial": "policy",
    "identical": "policy",
    "none": "none",
}
CASES = [
    *(("rejection", law, 3, draft) for law in LAWS for draft in ("trained", "random", "adversarial", "identical")),
    *(("rejection", "temperature 1", 1, draft) for draft in ("adversarial", "identical")),
    *(("rejection", "temperature 0.7", 1, draft) for draft in ("trained", "random")),
    ("rejection", "top-p", 1, "random reduced"),
    ("rejection", "top-p", 0, "none"),
    ("coupled", "temperature 1", 3, "trained"),
    ("coupled", "temperature 0.7", 1, "identical"),
    ("coupled", "top-k", 3, "adversarial"),
    ("coupled", "top-p", 1, "random"),
]


@functools.cache
def exact(law: str) -> Cells:
    return completion_law(WORLD.logits, WORLD.prompts[0], WORLD.vocab, WORLD.stops, BUDGET, LAWS[law])


@functools.cache
def sampled(verifier: str, law: str, k: int, draft: str) -> Rollout:
    config = RolloutConfig(
        group_size=DRAWS,
        max_new_tokens=BUDGET,
        draft_length=k,
        verifier=verifier,
        law=LAWS[law],
        stop_tokens=WORLD.stops,
    )
    return WORLD.rollout(DRAFTERS[draft], draft, config, seed_step(1, CASES.index((verifier, law, k, draft))))


def chi_square(verifier: str, law: str, k: int, draft: str) -> Fit:
    return fit(count_completions(sampled(verifier, law, k, draft)), exact(law))


@pytest.mark.parametrize("law", LAWS)
def test_the_law_is_worth_sampling(law: str):
    """All lengths occur, no completion dominates, and the enumeration is complete."""
    cells = exact(law)
    assert 20 < len(cells) <= 300
    assert sum(cells.values()) == pytest.approx(1, abs=1e-12)
    assert max(cells.values()) < 0.4
    lengths = np.bincount([len(cell) for cell in cells], weights=list(cells.values()))
    assert lengths[1:].min() > 0.04


@pytest.mark.parametrize("verifier, law, k, draft", CASES)
def test_completions_follow_the_policy(verifier: str, law: str, k: int, draft: str):
    result = chi_square(verifier, law, k, draft)
    assert result.draws == DRAWS
    assert result.p_value > LEVEL
    assert result.power(total_variation=0.02) > 0.99


def rates(rollout: Rollout) -> np.ndarray:
    return np.asarray(rollout.accepted).sum(axis=0) / np.asarray(rollout.drafted).sum(axis=0)


def test_the_drafts_are_what_they_are_called():
    trained, random, adversarial, identical = (
        rates(sampled("rejection", "temperature 1", 3, draft))
        for draft in ("trained", "random", "adversarial", "identical")
    )
    assert trained[0] > 0.8 > 0.6 > random[0] > 0.1 > adversarial[0]
    assert identical.min() > 0.9999


@pytest.mark.parametrize("verifier, law, k", [("rejection", "temperature 1", 3), ("coupled", "temperature 0.7", 1)])
def test_stop_tokens_occur_inside_accepted_spans(verifier: str, law: str, k: int):
    """Each round emits its accepted drafts and one token more, unless it is cut at an accepted stop token."""
    rollout = sampled(verifier, law, k, "identical")
    own = np.asarray(rollout.lengths) - 1 - np.asarray(rollout.accepted).sum(axis=1)
    cut = np.asarray(rollout.stopped) & (own < np.asarray(rollout.rounds))
    assert cut.sum() > 0.1 * DRAWS

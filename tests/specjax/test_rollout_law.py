"""Whole rollouts, sampled many thousand times, against the exact law of every completion."""

import functools

import numpy as np
import pytest

from specjax.keys import seed_step
from specjax.plan import RolloutConfig
from specjax.sampling import SamplingLaw
from specjax.types import Rollout
from tests.exact import LEVEL, Cells, completion_law, count_completions, fit
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
ACCEPTED_FIRST = {
    "trained": (0.8, 1.0),
    "random": (0.2, 0.7),
    "random reduced": (0.2, 0.7),
    "adversarial": (0.0, 0.1),
    "identical": (0.9999, 1.0),
}
CASES = [
    *(("rejection", law, 3, draft) for law in LAWS for draft in ("trained", "random", "adversarial", "identical")),
    *(("rejection", "temperature 1", 1, draft) for draft in ("adversarial", "identical")),
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
    """By chi-square; and the draft is what it is called, so that every way to emit a token takes part."""
    config = RolloutConfig(
        group_size=DRAWS,
        max_new_tokens=BUDGET,
        draft_length=k,
        verifier=verifier,
        law=LAWS[law],
        stop_tokens=WORLD.stops,
    )
    rollout = WORLD.rollout(DRAFTERS[draft], draft, config, seed_step(1, CASES.index((verifier, law, k, draft))))
    result = fit(count_completions(rollout), exact(law))
    assert result.draws == DRAWS
    assert result.p_value > LEVEL
    assert result.power(total_variation=0.02) > 0.99
    if k:
        least, most = ACCEPTED_FIRST[draft]
        assert least <= np.sum(rollout.accepted[:, 0]) / np.sum(rollout.drafted[:, 0]) <= most
    if draft == "identical":
        assert cut_at_an_accepted_stop(rollout) > 0.1 * DRAWS


def cut_at_an_accepted_stop(rollout: Rollout) -> int:
    """Every other round emits a token of its own after the accepted ones."""
    own = np.asarray(rollout.lengths) - 1 - np.asarray(rollout.accepted).sum(axis=1)
    return int(np.sum(np.asarray(rollout.stopped) & (own < np.asarray(rollout.rounds))))

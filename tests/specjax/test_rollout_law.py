"""Whole rollouts, sampled many thousand times, against the exact law of every completion."""

import functools
import itertools
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafters import HistoryDrafter
from specjax.keys import seed_step
from specjax.plan import ChosenConfig, RolloutConfig
from specjax.rollout import speculative_rollout
from specjax.sampling import SamplingLaw
from specjax.testing.exact import LEVEL, Cells, completion_law, count_completions, fit
from specjax.types import Params, Prompts, Rollout
from tests.tiny import ENUMERABLE as WORLD
from tests.tiny import light_jit

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
    "trained mtp": "mtp",
    "adversarial": "policy",
    "identical": "policy",
    "none": "none",
    "ngram": "ngram",
    "remembered": "history",
    "random beside ngram": "either",
    "stranger": "model",
}
ACCEPTED_FIRST = {
    "trained": (0.8, 1.0),
    "random": (0.2, 0.7),
    "random reduced": (0.2, 0.7),
    "trained mtp": (0.8, 1.0),
    "adversarial": (0.0, 0.1),
    "identical": (0.9999, 1.0),
    "ngram": (0.0, 1.0),
    "remembered": (0.0, 1.0),
    "random beside ngram": (0.0, 1.0),
    "stranger": (0.0, 1.0),
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
    ("rejection", "top-p", 3, "trained mtp"),
    ("rejection", "temperature 1", 3, "ngram"),
    ("rejection", "top-p", 3, "remembered"),
    ("rejection", "temperature 0.7", 3, "random beside ngram"),
    ("rejection", "top-k", 3, "stranger"),
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


def test_completions_follow_the_policy_through_queue_and_phases():
    """A third of the sequences at a time, in windows that grow and slots that shrink, at a K that changes with them."""
    width, draws = WORLD.batch.tokens.shape[1], DRAWS // 2
    config = RolloutConfig(
        group_size=draws,
        max_new_tokens=BUDGET,
        draft_lengths=(0, 2),
        law=LAWS["top-p"],
        stop_tokens=WORLD.stops,
        phases=((draws // 3, width), (draws // 3, width + BUDGET), (draws // 20, width + BUDGET)),
    )

    @light_jit
    def program(params: Params, prompts: Prompts) -> Rollout:
        chosen = ChosenConfig(**vars(config), chosen=jnp.array([0, 1, 0]))
        return speculative_rollout(WORLD.policy, WORLD.drafters["eagle3"], params, prompts, seed_step(1, 99), chosen)

    rollout = program(WORLD.params("trained"), WORLD.batch)
    assert (np.asarray(rollout.trips) > 0).all()
    result = fit(count_completions(rollout), exact("top-p"))
    assert result.draws == draws
    assert result.p_value > LEVEL
    assert result.power(total_variation=0.03) > 0.99


def test_samples_that_draft_from_each_other_are_independent():
    """Pairs of samples follow the product of their laws, though each proposes what the other has said."""
    budget, pairs = 3, DRAWS // 2
    config = RolloutConfig(group_size=2, max_new_tokens=budget, draft_length=2, stop_tokens=WORLD.stops)
    drafter = HistoryDrafter(WORLD.vocab, min_n=1, max_n=3, siblings=2)
    prompts = jax.tree.map(lambda x: jnp.repeat(x, pairs, axis=0), WORLD.batch)
    prompts = replace(prompts, id=jnp.arange(pairs))

    @light_jit
    def program(params: Params, prompts: Prompts) -> Rollout:
        return speculative_rollout(WORLD.policy, drafter, params, prompts, seed_step(1, 100), config)

    rollout = program(WORLD.params("none"), prompts)
    alone = completion_law(WORLD.logits, WORLD.prompts[0], WORLD.vocab, WORLD.stops, budget, SamplingLaw())
    # -1 stands between the two.
    cells = {(*a, -1, *b): p * q for (a, p), (b, q) in itertools.product(alone.items(), repeat=2)}
    said = [tuple(row[:n]) for row, n in zip(rollout.tokens.tolist(), rollout.lengths.tolist(), strict=True)]
    counts = Counter((*a, -1, *b) for a, b in zip(said[::2], said[1::2], strict=True))
    result = fit(counts, cells)
    assert result.draws == pairs
    assert result.p_value > LEVEL
    assert result.power(total_variation=0.05) > 0.99
    # Prompt and first token of most rows repeat nothing: what is drafted then is a sibling's.
    assert np.asarray(rollout.drafted)[:, 0].mean() > 0.3

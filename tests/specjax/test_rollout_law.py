"""Chi-square tests of whole rollouts against the exact distribution of completions.

To add a drafter, add a line to `DRAFTS`, and entries to `World.drafters` and `World.draft` in tests/tiny.py.
"""

import functools
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from specjax.drafters import HistoryDrafter
from specjax.keys import SeedStep, seed_step
from specjax.rollout.plan import ChosenConfig, RolloutConfig
from specjax.rollout.speculative import speculative_rollout
from specjax.sampling import SamplingLaw
from specjax.testing.exact import Cells, Fit, completion_law, count_completions, fit
from specjax.types import Params, Prompts, Rollout
from specjax.verify import VERIFIERS, VerifierName
from tests.specjax.training import AS_SHIPPED
from tests.tiny import ENUMERABLE as WORLD
from tests.tiny import chosen

BUDGET, BATCH, IN_PHASES = 5, 2**14, 45_000
LAWS = {
    "greedy": SamplingLaw(temperature=0.0),
    "temperature 1": SamplingLaw(),
    "temperature 0.7": SamplingLaw(temperature=0.7),
    "top-k": SamplingLaw(top_k=3),
    "top-p": SamplingLaw(temperature=0.7, top_p=0.9),
    "min-p": SamplingLaw(min_p=0.05),
}


class Draft(NamedTuple):
    """Name of a drafter, and the range of its acceptance at position 1 by `rejection` when it samples."""

    drafter: str
    accepted: tuple[float, float]


DRAFTS = {
    "none": Draft("none", (0.0, 0.0)),
    "trained": Draft("eagle3", (0.8, 1.0)),
    "random": Draft("eagle3", (0.2, 0.7)),
    "random reduced": Draft("eagle3 reduced", (0.2, 0.7)),
    "adversarial": Draft("policy", (0.0, 0.15)),
    "identical": Draft("policy", (0.9999, 1.0)),
    "table": Draft("table", (0.3, 0.7)),
    "trained mtp": Draft("mtp", (0.8, 1.0)),
    "trained dspark": Draft("dspark", (0.7, 1.0)),
    "trained dflash": Draft("dflash", (0.7, 1.0)),
    "random dspark reduced": Draft("dspark reduced", (0.2, 0.7)),
    "ngram": Draft("ngram", (0.4, 0.8)),
    "remembered": Draft("history", (0.2, 0.5)),
    "random beside ngram": Draft("either", (0.3, 0.6)),
    "stranger": Draft("model", (0.3, 0.6)),
    "trained beside remembered": Draft("either history", (0.3, 0.6)),
}
# Every kind of proposal and every law, except greedy, which test_rollout_coupled.py tests. Slow tests add the other
# drafts, and, with a million draws, all combinations for one draft of each kind.
COVERING = [
    ("none", "top-p", 0),
    ("trained", "temperature 1", 3),
    ("random reduced", "temperature 0.7", 1),
    ("trained mtp", "top-p", 3),
    ("trained beside remembered", "min-p", 3),
    ("trained dspark", "top-p", 3),
]
LEFT_OUT = [
    ("identical", "top-k", 3),
    ("random", "temperature 1", 3),
    ("adversarial", "temperature 0.7", 1),
    ("table", "temperature 1", 3),
    ("random beside ngram", "temperature 0.7", 3),
    ("trained dflash", "min-p", 3),
    ("random dspark reduced", "temperature 0.7", 3),
]


# One drafter of every kind, for a million draws.
KINDS = (
    *("none", "trained", "trained mtp", "trained dspark", "ngram", "remembered", "stranger"),
    "trained beside remembered",
)
# Drafts that are tested with every verifier: trained, deterministic and from a lookup.
BY_ALL = ("trained", "trained dspark", "random reduced", "table", "random beside ngram", "trained beside remembered")


@functools.cache
def exact(law: str, strings: bool = False) -> Cells:
    ends = WORLD.ends if strings else lambda _: False
    return completion_law(WORLD.logits, WORLD.prompts[0], WORLD.vocab, WORLD.stops, BUDGET, LAWS[law], ends)


@pytest.mark.parametrize("law", [law for law in LAWS if law != "greedy"])
def test_the_exact_law_gives_the_test_power(law: str):
    """The test has power: all lengths occur, no completion dominates, and the enumeration is complete."""
    cells = exact(law)
    assert 20 < len(cells) <= 300
    assert sum(cells.values()) == pytest.approx(1, abs=1e-12)
    assert max(cells.values()) < 0.4
    lengths = np.bincount([len(cell) for cell in cells], weights=list(cells.values()))
    assert lengths[1:].min() > 0.04


@functools.cache
def program(drafter: str, law: str, k: int, as_shipped: bool) -> Callable[[Params, Prompts, int, SeedStep], Rollout]:
    """Return a program (params, prompts, index of the verifier, run) -> BATCH samples."""

    @functools.partial(jax.jit, compiler_options=AS_SHIPPED if as_shipped else None)
    def run(params: Params, prompts: Prompts, verifier: Array, run: SeedStep) -> Rollout:
        options = dict(max_new_tokens=BUDGET, draft_length=k, law=LAWS[law], stop_tokens=WORLD.stops)
        config = RolloutConfig(group_size=BATCH, verifier=chosen(verifier), **options)
        return speculative_rollout(WORLD.policy, WORLD.drafters[drafter], params, prompts, run, config)

    return run


def check(verifier: VerifierName, draft: str, law: str, k: int, batches: int, total_variation: float) -> Fit:
    """Run the chi-square test. Also verify that acceptance is in the draft's range, so all kinds of emissions occur."""
    # A better compiled program saves half an hour for a million draws, but does not pay off for a few batches.
    run = program(DRAFTS[draft].drafter, law, k, as_shipped=batches > 2)
    sampled = law != "greedy"
    place, seed = list(VERIFIERS).index(verifier), len(DRAFTS) * list(LAWS).index(law) + list(DRAFTS).index(draft)
    counts, rollouts = Counter(), []
    for batch in range(batches):
        noise = seed_step(seed, len(VERIFIERS) * batch + place)
        rollout = run(WORLD.params(draft), WORLD.batch, jnp.int32(place), noise)
        counts.update(count_completions(rollout))
        rollouts.append(jax.tree.map(np.asarray, rollout))
    result = fit(counts, exact(law), total_variation)
    assert result.draws == batches * BATCH
    assert result.passes, result
    assert result.power > 0.99, result
    if verifier == "rejection" and sampled and k:
        least, most = DRAFTS[draft].accepted
        drafted, accepted = (sum(getattr(x, name)[:, 0].sum() for x in rollouts) for name in ("drafted", "accepted"))
        assert least <= accepted / drafted <= most
    if draft == "identical" and sampled:
        assert sum(cut_at_an_accepted_stop(x) for x in rollouts) > 0.1 * result.draws
    return result


def cut_at_an_accepted_stop(rollout: Rollout) -> int:
    """Return the number of rows that end with an accepted stop token.

    In every other round, the policy emits a token of its own after the accepted ones.
    """
    assert rollout.accepted is not None
    own = np.asarray(rollout.lengths) - 1 - np.asarray(rollout.accepted).sum(axis=1)
    return int(np.sum(np.asarray(rollout.stopped) & (own < np.asarray(rollout.row_rounds))))


# One program holds all verifiers. Each takes seconds to sample, and they differ only for sampled drafts.
CASES = [
    pytest.param(name, *case, marks=() if case in COVERING else pytest.mark.slow)
    for case in COVERING + LEFT_OUT
    for name in VERIFIERS
    if name == "rejection" or case[0] in BY_ALL
]


@pytest.mark.parametrize("verifier, draft, law, k", CASES)
def test_completions_follow_the_policy(verifier: VerifierName, draft: str, law: str, k: int):
    """16,384 draws, level 1e-6, power above 0.99 at total variation 0.06."""
    check(verifier, draft, law, k, batches=1, total_variation=0.06)


@pytest.mark.slow
@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("draft", KINDS)
def test_a_million_completions_follow_the_policy(verifier: VerifierName, draft: str, law: str):
    """1,015,808 draws, level 1e-6, power above 0.99 at total variation 0.01. If all draws are equal, 32,768 suffice."""
    batches = 2 if law == "greedy" else 62
    result = check(verifier, draft, law, 0 if draft == "none" else 3, batches, total_variation=0.01)
    # Shown by `pytest -rP`.
    print(f"{draft}, {law}, {verifier}: {result}")


@functools.cache
def in_phases(drafter: str, law: str) -> Callable[[Params, Prompts, Array, Array], Rollout]:
    """Return a program (params, prompts, index of the verifier, choice for each phase) -> IN_PHASES samples.

    A third of the samples is active at a time, in windows that grow and slots that shrink. Stop strings end them too.
    """
    width = WORLD.batch.tokens.shape[1]
    phases = ((IN_PHASES // 3, width), (IN_PHASES // 3, width + BUDGET), (IN_PHASES // 20, width + BUDGET))

    @jax.jit
    def run(params: Params, prompts: Prompts, verifier: Array, choice: Array) -> Rollout:
        options = dict(max_new_tokens=BUDGET, draft_lengths=(0, 2), law=LAWS[law], stop_tokens=WORLD.stops)
        options |= dict(stop_strings=WORLD.stop_strings)
        config = ChosenConfig(group_size=IN_PHASES, verifier=chosen(verifier), phases=phases, chosen=choice, **options)
        return speculative_rollout(WORLD.policy, WORLD.drafters[drafter], params, prompts, seed_step(1, 99), config)

    return run


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize(
    "draft, law, choice",
    [
        ("trained", "top-p", (0, 1, 0)),
        pytest.param("trained", "top-p", (1, 0, 1), marks=pytest.mark.slow),
        pytest.param("ngram", "temperature 1", (1, 0, 1), marks=pytest.mark.slow),
    ],
)
def test_completions_follow_the_policy_through_queue_and_phases(
    draft: str, law: str, choice: tuple[int, ...], verifier: VerifierName
):
    """The draft length changes between phases, so rows start drafting late and stop again."""
    run, place = in_phases(DRAFTS[draft].drafter, law), jnp.int32(list(VERIFIERS).index(verifier))
    rollout = run(WORLD.params(draft), WORLD.batch, place, jnp.array(choice))
    assert (np.asarray(rollout.loop_rounds) > 0).all() and np.asarray(rollout.accepted).sum() > 0
    result = fit(count_completions(rollout), exact(law, strings=True), total_variation=0.03)
    assert not fit(count_completions(rollout), exact(law), total_variation=0.03).passes
    assert result.draws == IN_PHASES
    assert result.passes, result
    assert result.power > 0.99


@pytest.mark.slow
@pytest.mark.parametrize("together", [True, False], ids=["side by side", "one after the other"])
def test_samples_that_draft_from_each_other_are_independent(together: bool):
    """Pairs of samples follow the product of their laws, although samples propose each other's tokens."""
    budget, pairs, plan = 3, 45_000, () if together else ((1, 99),)
    config = RolloutConfig(group_size=2, max_new_tokens=budget, draft_length=2, stop_tokens=WORLD.stops, phases=plan)
    drafter = HistoryDrafter(WORLD.vocab, min_n=1, max_n=3, siblings=2, offset=1)
    prompts = jax.tree.map(lambda x: jnp.repeat(x, pairs, axis=0), WORLD.batch)
    prompts = replace(prompts, id=jnp.arange(pairs))

    def generate(params: Params, prompts: Prompts) -> Rollout:
        return speculative_rollout(WORLD.policy, drafter, params, prompts, seed_step(1, 100), config)

    def by_itself(params: Params, prompts: Prompts) -> Rollout:
        """Generate with a queue per prompt: the second sample starts when the first has ended."""
        apart = jax.tree.map(lambda x: x[:, None], prompts)
        rollouts = jax.vmap(generate, in_axes=(None, 0))(params, apart)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rollouts)

    rollout = jax.jit(generate if together else by_itself)(WORLD.params("none"), prompts)
    alone = completion_law(WORLD.logits, WORLD.prompts[0], WORLD.vocab, WORLD.stops, budget, SamplingLaw())
    # -1 separates the two samples.
    cells = {(*a, -1, *b): p * q for (a, p), (b, q) in itertools.product(alone.items(), repeat=2)}
    said = [tuple(row[:n]) for row, n in zip(rollout.tokens.tolist(), rollout.lengths.tolist(), strict=True)]
    counts = Counter((*a, -1, *b) for a, b in zip(said[::2], said[1::2], strict=True))
    result = fit(counts, cells, total_variation=0.05)
    assert result.draws == pairs
    assert result.passes, result
    assert result.power > 0.99
    # Prompt and first token of most rows repeat nothing, so a draft after them comes from the other sample.
    drafted = np.asarray(rollout.drafted).reshape(pairs, 2, 2)
    first, second = drafted[:, :, 0].mean(axis=0)
    assert second > 0.3 if together else second > 1.2 * first

"""Rollouts with lookups or a small model as the drafter: tokens do not change, and acceptance equals a replay."""

import functools
from collections.abc import Callable
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from specjax.cost import choose, init_drafting, update_drafting
from specjax.drafters import Drafter, HistoryDrafter, NGramDrafter, NoDrafter
from specjax.drafters.history import HistoryState
from specjax.keys import seed_step
from specjax.rollout.admission import compact, share_finished, write_back
from specjax.rollout.lookup_acceptance import PLACES_PER_ROW
from specjax.rollout.plan import RolloutConfig, choose_lengths
from specjax.rollout.rounds import Decoding, RoundState, rounds
from specjax.rollout.speculative import speculative_rollout, start_rollout
from specjax.sampling import SamplingLaw
from specjax.types import Params, Prompts, PyTree, Rollout
from tests.chain import COUNTING, chain
from tests.specjax.test_lookup import searched
from tests.tiny import WANDERING as WORLD
from tests.tiny import assert_same

GROUP, BUDGET, RUN = 4, 24, seed_step(3, 5)
SEQUENCES = 4 * GROUP
STOP = 4


POLICY = chain(5)
CONFIG = RolloutConfig(group_size=GROUP, max_new_tokens=BUDGET, draft_length=0, verifier="coupled", stop_tokens=(STOP,))
GREEDY = replace(CONFIG, verifier="rejection", law=SamplingLaw(temperature=0.0), draft_length=3)
PROMPTS = Prompts(
    tokens=jnp.array([[0, 1, 2, 3], [2, 4, 4, 4], [3, 0, 3, 0], [1, 1, 4, 4]]),
    lengths=jnp.array([4, 1, 4, 2]),
    id=jnp.array([5, 0, 3, 8]),
)
NGRAM = NGramDrafter(5, min_n=1, max_n=3)
HISTORY = HistoryDrafter(5, min_n=1, max_n=3, kept=2, siblings=GROUP)


# A queue, growing windows and shrinking slots.
PHASED = replace(CONFIG, draft_lengths=(0, 2), phases=((8, 14), (8, 99), (3, 99)))


@functools.cache
def program(drafter: Drafter, config: RolloutConfig) -> Callable[[Array | tuple[()], Array | None], Rollout]:
    def rollout(memory: Array | tuple[()], chosen: Array | None) -> Rollout:
        own = choose_lengths(config, chosen)
        return speculative_rollout(POLICY, drafter, Params(COUNTING, {}, memory), PROMPTS, RUN, own)

    return jax.jit(rollout)


def run(drafter: Drafter, config: RolloutConfig, memory: Array | tuple[()] = (), *chosen: int) -> Rollout:
    """Run a rollout. chosen: index of each phase's draft length, if the config has several."""
    return program(drafter, config)(memory, jnp.array(chosen) if chosen else None)


def remembered(rollout: Rollout) -> Array:
    return HISTORY.memory.remember(HISTORY.memory.blank(9, BUDGET), PROMPTS, rollout)


@pytest.fixture(scope="module")
def plain() -> Rollout:
    return run(NoDrafter(), CONFIG)


@pytest.mark.parametrize(
    "drafter", [pytest.param(NGRAM, marks=pytest.mark.slow, id="ngram"), pytest.param(HISTORY, id="history")]
)
def test_tokens_do_not_depend_on_a_lookup(plain: Rollout, drafter: Drafter):
    """The same holds if drafting starts late, stops and starts again."""
    memory = () if drafter is NGRAM else remembered(plain)
    rollouts = [run(drafter, PHASED, memory, *chosen) for chosen in ([1] * 3, [0, 1, 1], [1, 0, 1])]
    for rollout in rollouts:
        assert_same(rollout, plain)
    drafted = [int(np.sum(rollout.drafted)) for rollout in rollouts]
    assert 0 < min(drafted) and max(drafted[1:]) < drafted[0]


def replayed(
    prompt: list[int], completion: list[int], k: int, emitted: int = 1, others: tuple[list[int], ...] = ()
) -> tuple[list[int], list[int]]:
    """Return how often each position 1 .. k of a lookup's proposals could be emitted in this row, and how often it was.

    emitted: number of completion tokens before the first draft.
    others:  further texts to search. Drafts from them are no longer than their match.
    """
    drafted, accepted, row, at = [0] * k, [0] * k, prompt + completion, len(prompt) + emitted
    while at < len(row):
        matched, proposal = searched([row[:at], *others], row[:at], 1, 3, k)
        proposal = proposal[:matched] if others else proposal
        kept = 0
        for i, token in enumerate(proposal):
            if at + i < len(prompt) + BUDGET and STOP not in proposal[:i]:
                drafted[i] += 1
            if kept == i and at + i < len(row) and token == row[at + i]:
                kept += 1
                accepted[i] += 1
        at += kept + 1
    return drafted, accepted


def words(tokens: Array, lengths: Array) -> list[list[int]]:
    return [row[:n] for row, n in zip(tokens.tolist(), lengths.tolist(), strict=True)]


def test_ngrams_are_accepted_as_often_as_a_replay_says(plain: Rollout):
    """With a queue and phases. The chain repeats itself, so a round emits far more than one token."""
    rollout = run(NGRAM, PHASED, (), 1, 1, 1)
    completions, prompts = words(plain.tokens, plain.lengths), words(PROMPTS.tokens, PROMPTS.lengths)
    expected = [replayed(prompts[i // GROUP], row, 2) for i, row in enumerate(completions)]
    np.testing.assert_array_equal(rollout.drafted, [drafted for drafted, _ in expected])
    np.testing.assert_array_equal(rollout.accepted, [accepted for _, accepted in expected])
    emitted = np.asarray(rollout.lengths - 1).sum()
    assert emitted > 1.5 * np.asarray(rollout.row_rounds).sum()


@pytest.mark.slow
def test_greedy_text_of_the_last_epoch_is_fully_accepted():
    """The whole completion is drafted and accepted, from the first round on."""
    drafter = HistoryDrafter(5, min_n=1, max_n=2 * BUDGET, siblings=0, offset=3)
    before = run(NoDrafter(), replace(GREEDY, draft_length=0))
    rollout = run(drafter, GREEDY, remembered(before))
    assert_same(rollout, before)
    np.testing.assert_array_equal(rollout.accepted, rollout.drafted)
    np.testing.assert_array_equal(rollout.row_rounds, -(-(np.asarray(before.lengths) - 1) // 4))


class Deaf(HistoryDrafter):
    """Drafter that does not learn of siblings that have left their rows."""

    def observe_finished(self, state, prompts, finished):
        return state


@pytest.mark.slow
def test_siblings_that_finished_are_found_when_their_rows_are_refilled():
    """A policy that counts to its stop token repeats nothing, so a row can only draft a sibling's tokens."""
    policy, counting = chain(24), 9.0 * jnp.eye(24, k=1)
    prompts = replace(PROMPTS, tokens=jnp.arange(16).reshape(4, 4), lengths=jnp.array([4, 1, 2, 3]))
    config = replace(GREEDY, max_new_tokens=30, stop_tokens=(23,), phases=((1, 99),))

    def rounds_of(drafter: Drafter) -> np.ndarray:
        params = Params(counting, {}, ())
        rollout = jax.jit(lambda: speculative_rollout(policy, drafter, params, prompts, RUN, config))()
        assert rollout.tokens[4].tolist() == [*range(5, 24)] + [0] * 11
        np.testing.assert_array_equal(rollout.accepted, rollout.drafted)
        return np.asarray(rollout.row_rounds).reshape(4, GROUP)

    after_first = np.array([20, 19, 14, 9]) - 1
    options = dict(vocab_size=24, min_n=1, max_n=3, siblings=GROUP, offset=3)
    np.testing.assert_array_equal(rounds_of(Deaf(**options)), np.tile(after_first[:, None], GROUP))
    heard = rounds_of(HistoryDrafter(**options))
    np.testing.assert_array_equal(heard[:, 0], after_first)
    np.testing.assert_array_equal(heard[:, 1:], np.tile(-(-after_first[:, None] // 4), GROUP - 1))


def test_siblings_that_finished_are_known_when_the_batch_shrinks():
    """Rows that have not finished do not change."""
    decoding = Decoding(POLICY, HISTORY, Params(COUNTING, {}, ()), replace(CONFIG, draft_length=2))

    def few(state: RoundState, _: Array) -> Array:
        return jnp.sum(~state.done) <= 2

    @jax.jit
    def shrink() -> tuple[RoundState, Rollout, RoundState]:
        carry = start_rollout(decoding, PROMPTS, RUN, SEQUENCES)
        state = rounds(decoding, carry.state, 2, few)[0]
        record = write_back(carry.record, state)
        return state, record, share_finished(decoding, compact(state, 2), record, PROMPTS)

    state, record, left = shrink()
    assert np.sum(~state.done) == 2 and not left.done.any()
    prompts, ended = words(PROMPTS.tokens, PROMPTS.lengths), words(record.tokens, record.lengths)
    for row, sequence in enumerate(left.sequence.tolist()):
        group = sequence // GROUP
        texts = [[token - 1 for token in text if token] for text in left.draft.finished[row].tolist()]
        said = [ended[group * GROUP + i] for i in range(GROUP)]
        assert texts == [prompts[group] + completion for completion in sorted(said, key=lambda it: not it)]
        assert not said[sequence % GROUP] and any(said)


TINY = RolloutConfig(group_size=2, max_new_tokens=12, draft_length=0, verifier="coupled", stop_tokens=WORLD.stops)


def test_a_draft_model_equal_to_the_policy_is_always_accepted():
    """Its proposals are right in every round, so its own cache is right too."""
    rollout = WORLD.rollout("model", "twin", replace(TINY, draft_length=3), RUN)
    np.testing.assert_array_equal(rollout.accepted, rollout.drafted)
    assert_same(rollout, WORLD.rollout("none", "none", TINY, RUN))
    np.testing.assert_array_equal(rollout.row_rounds, -(-(np.asarray(rollout.lengths) - 1) // 4))


@pytest.mark.parametrize("drafter", [NGRAM, replace(HISTORY, siblings=0)], ids=["ngram", "history"])
def test_a_lookup_that_starts_late_knows_all_earlier_tokens(plain: Rollout, drafter: Drafter):
    """It knows the prompt, earlier completions and tokens of draft length 0, so it drafts as if it always had."""
    options = replace(CONFIG, draft_lengths=(0, 3), phases=((16, 8), (16, 99)))
    memory = () if drafter is NGRAM else remembered(plain)
    rollout = run(drafter, options, memory, 0, 1)
    assert_same(rollout, plain)
    before = 1 + int(np.asarray(rollout.loop_rounds)[0, 0])
    assert before > 4
    prompts, completions = words(PROMPTS.tokens, PROMPTS.lengths), words(plain.tokens, plain.lengths)
    expected = []
    for i, completion in enumerate(completions):
        group = i // GROUP
        known = () if drafter is NGRAM else tuple(prompts[group] + completions[group * GROUP + j] for j in range(2))
        expected.append(replayed(prompts[group], completion, 3, before, known))
    np.testing.assert_array_equal(rollout.drafted, [drafted for drafted, _ in expected])
    np.testing.assert_array_equal(rollout.accepted, [accepted for _, accepted in expected])
    assert np.sum(rollout.accepted) > 2 * SEQUENCES


@pytest.mark.parametrize("chosen", [0, 1])
@pytest.mark.parametrize("drafter", [NGRAM, replace(HISTORY, siblings=0, offset=9)], ids=["ngram", "history"])
def test_hindsight_counts_how_often_a_lookup_would_have_been_right(plain: Rollout, drafter: Drafter, chosen: int):
    """Hindsight counts all positions of completions, drafted or not. Drafting then starts if it pays."""
    memory = () if drafter is NGRAM else remembered(plain)
    options = replace(CONFIG, draft_lengths=(0, 2))
    rollout = run(drafter, options, memory, chosen)
    if not chosen:
        # As in a step that compiles no drafts.
        chex.assert_trees_all_equal(run(drafter, choose_lengths(options, 0), memory), rollout)
    asked, kept = [0, 0], [0, 0]
    prompts, completions = words(PROMPTS.tokens, PROMPTS.lengths), words(plain.tokens, plain.lengths)
    for i, completion in enumerate(completions):
        prompt, group = prompts[i // GROUP], i // GROUP * GROUP
        others = [] if drafter is NGRAM else [prompt + completions[group + j] for j in range(2)]
        places = {1 + number * (len(completion) - 1) // PLACES_PER_ROW for number in range(PLACES_PER_ROW)}
        for known in range(1, len(completion)) if len(completion) <= PLACES_PER_ROW else sorted(places):
            text, came = prompt + completion[:known], completion[known : known + 2]
            proposal = searched([text, *others], text, 1, 3, 2)[1]
            for j in range(len(came)):
                asked[j] += 1
                kept[j] += proposal[: j + 1] == came[: j + 1]
    np.testing.assert_array_equal(rollout.lookup_counts, [[asked, kept]])
    assert 0.3 < kept[0] / asked[0] < 0.9
    known = update_drafting(init_drafting((0, 2), np.array([[1.0, 1.3]], np.float32)), rollout, None, (0, 2))
    assert choose(known, (0, 2)).tolist() == [1]


def test_an_ended_row_does_not_search_its_own_completion(plain: Rollout):
    """Otherwise hindsight would find the completion itself as a match."""
    options = choose_lengths(replace(CONFIG, draft_lengths=(0, 2)), jnp.array([0]))
    decoding = Decoding(POLICY, HISTORY, Params(COUNTING, {}), options)

    @jax.jit
    def told(record: Rollout) -> HistoryState:
        return share_finished(decoding, start_rollout(decoding, PROMPTS, RUN, SEQUENCES).state, record, PROMPTS).draft

    state, completions = told(plain), words(plain.tokens, plain.lengths)
    for row, texts in enumerate(np.asarray(state.finished).tolist()):
        prompt, first = words(PROMPTS.tokens, PROMPTS.lengths)[row // GROUP], row // GROUP * GROUP
        known = [text for text in texts if text[len(prompt)]]
        others = [prompt + completions[i] for i in range(first, first + GROUP) if i != row]
        assert known == [[token + 1 for token in text] + [0] * (len(texts[0]) - len(text)) for text in others]


def test_draft_length_0_does_not_call_the_draft_and_a_lookup_beside_it_catches_up():
    """The lookup adds all tokens that were emitted meanwhile. A trained draft's state stays blank."""
    options = choose_lengths(replace(TINY, draft_lengths=(0, 2)), jnp.array([0]))
    drafter, params = WORLD.drafters["either"], WORLD.params("random")
    decoding = Decoding(WORLD.policy, drafter, params, options)

    def six(state: RoundState, _: Array) -> Array:
        return (jnp.max(state.emitted) > 5) | state.done.all()

    @jax.jit
    def decode(prompts: Prompts) -> tuple[RoundState, RoundState, PyTree]:
        first = start_rollout(decoding, prompts, RUN, 12).state
        state = rounds(decoding, first, 0, six)[0]
        return first, state, drafter.catch_up(state.draft, state.visible, state.tokens, state.emitted)

    first, state, aligned = decode(WORLD.batch)
    for then, now in zip(jax.tree.leaves(first.draft), jax.tree.leaves(state.draft), strict=True):
        np.testing.assert_array_equal(now, then)
    texts, expected = aligned.lookup, words(WORLD.batch.tokens, WORLD.batch.lengths)
    assert (state.emitted > 5).any() and len({len(prompt) for prompt in expected}) > 1
    for i, (row, length) in enumerate(zip(texts.cache.tokens.tolist(), texts.length.tolist(), strict=True)):
        said = expected[i // 2] + state.tokens[i, : state.emitted[i]].tolist()
        assert row == [token + 1 for token in said] + [0] * (len(row) - len(said)) and length == len(said)
    assert not any(layer.k.any() for layer in aligned.trained.cache)

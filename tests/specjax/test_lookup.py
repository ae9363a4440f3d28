"""Lookups in texts and the drafters that use them, compared with plain Python."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import cache as kv
from specjax.drafters import Drafter, EitherDrafter, HistoryDrafter, ModelDrafter, NGramDrafter, Proposal
from specjax.drafters.base import DraftLoss
from specjax.drafters.lookup import Text, last_tokens, look_up, one_hot_proposal, prompt_text, with_tokens
from specjax.drafters.lookup_beside_head import found_or_drafted
from specjax.sampling import SamplingLaw
from specjax.types import Params, PolicyOutput, Prompts, PyTree, Rollout
from tests.chain import chain
from tests.refusals import refuses

Words = list[int | None]
VOCAB, LAW = 3, SamplingLaw()
NOTHING = Params({}, {})


def searched(texts: list[Words], end: Words, min_n: int, max_n: int, count: int) -> tuple[int, list[int]]:
    """Return (matched tokens, the tokens that followed) of the longest match; of equals, the last in the first text.

    A token None is unknown and matches nothing.
    """
    for n in range(min(max_n, len(end)), min_n - 1, -1):
        for text in texts:
            for i in range(len(text) - 1, n - 1, -1):
                if None not in end[-n:] and text[i - n : i] == end[-n:] and text[i] is not None:
                    after = text[i : i + count]
                    return n, [token for token in after[: (after + [None]).index(None)] if token is not None]
    return 0, []


def encoded(text: Words, width: int) -> list[int]:
    return [0 if token is None else token + 1 for token in text] + [0] * (width - len(text))


@pytest.mark.parametrize("min_n, max_n, count", [(1, 1, 1), (1, 4, 3), (3, 4, 5)])
def test_the_longest_match_and_what_followed(min_n: int, max_n: int, count: int):
    """Search random texts of few different tokens, some unknown; some are shorter than n, some have no match."""
    rng, rows, width = np.random.default_rng(0), 500, 14

    def words() -> Words:
        text: Words = rng.integers(VOCAB, size=rng.integers(0, width + 1)).tolist()
        return [None if rng.random() < 0.1 else token for token in text]

    texts, ends = [[words() for _ in range(2)] for _ in range(rows)], [words() for _ in range(rows)]
    end = jnp.array([([0] * max_n + encoded(end, len(end)))[-max_n:] for end in ends])
    known = jnp.array([[encoded(text, width) for text in pair] for pair in texts])
    found = jax.jit(look_up, static_argnums=(2, 3))(known, end, min_n, count)
    expected = [searched(pair, own, min_n, max_n, count) for pair, own in zip(texts, ends, strict=True)]
    np.testing.assert_array_equal(found.matched, [n for n, _ in expected])
    np.testing.assert_array_equal(found.known, [len(after) for _, after in expected])
    for got, (_, after) in zip(np.asarray(found.tokens).tolist(), expected, strict=True):
        assert got[: len(after)] == after
    lengths = {len(after) for _, after in expected}
    assert lengths == set(range(count + 1)) and len({n for n, _ in expected}) == max_n - min_n + 2


def prompts_of(*texts: list[int], ids: tuple[int, ...] = ()) -> Prompts:
    width = max(map(len, texts)) + 1
    tokens = np.full((len(texts), width), 2, np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    lengths = np.array([len(text) for text in texts], np.int32)
    id = np.array(ids or range(len(texts)), np.int32)
    return Prompts(jnp.asarray(tokens), jnp.asarray(lengths), jnp.asarray(id))


def words_of(text: Text) -> list[Words]:
    return [[None if t == 0 else t - 1 for t in row] for row in np.asarray(text.cache.tokens).tolist()]


def test_a_text_grows_by_the_emitted_tokens():
    text = jax.jit(lambda prompts: kv.resize(prompt_text(prompts), 5))(prompts_of([0, 1], [2]))
    grown, newest = jax.jit(with_tokens), jax.jit(last_tokens, static_argnums=1)
    text = grown(text, jnp.array([[1, 2, 0], [0, 0, 1]]), jnp.array([2, 0]))
    assert words_of(text) == [[0, 1, 1, 2, *[None] * 5], [2, *[None] * 8]]
    assert newest(text, 3).tolist() == [[2, 2, 3], [0, 0, 3]]
    text = grown(text, jnp.array([[0], [1]]), jnp.array([1, 1]))
    assert words_of(text) == [[0, 1, 1, 2, 0, *[None] * 4], [2, 1, *[None] * 7]]
    assert newest(text, 3).tolist() == [[2, 3, 1], [0, 3, 2]]


@partial(jax.jit, static_argnums=0)
def started(drafter: Drafter, params: Params, prompts: Prompts) -> PyTree:
    """Return the drafter's state after the prompts, with space for six tokens."""
    return kv.resize(drafter.start(params, prompts, jnp.zeros((*prompts.tokens.shape, 0)), 4), 5)


@partial(jax.jit, static_argnums=0)
def after_observing(drafter: Drafter, state: PyTree, tokens: jax.Array, emitted: jax.Array) -> PyTree:
    return drafter.observe(state, jnp.zeros((*tokens.shape, 0)), tokens, emitted)


@partial(jax.jit, static_argnums=(0, 3))
def proposal_of(drafter: Drafter, params: Params, state: PyTree, k: int) -> Proposal:
    rows = len(jax.tree.leaves(state)[0])
    return drafter.propose(params, state, jnp.zeros((rows, k, VOCAB)), LAW)[0]


def proposed(drafter: Drafter, state: PyTree, k: int, params: Params = NOTHING) -> list[list[int]]:
    proposal = proposal_of(drafter, params, state, k)
    log_q = np.asarray(proposal.log_q)
    assert (log_q.max(axis=-1) == 0).all() and ((log_q == 0).sum(axis=-1) == 1).all()
    np.testing.assert_array_equal(log_q.argmax(axis=-1), proposal.tokens)
    rows = zip(proposal.tokens.tolist(), proposal.length.tolist(), strict=True)
    return [tokens[:length] for tokens, length in rows]


def test_ngrams_are_looked_up_in_the_rows_own_text():
    drafter = NGramDrafter(VOCAB, min_n=2, max_n=3)
    state = started(drafter, NOTHING, prompts_of([0, 1, 2, 2, 0], [0, 1, 0, 2, 0, 1]))
    state = after_observing(drafter, state, jnp.array([[1], [0]]), jnp.array([1, 1]))
    assert proposed(drafter, state, 3) == [[2, 2, 0], [2, 0, 1]]
    assert proposed(NGramDrafter(VOCAB, min_n=3), state, 3) == [[], [2, 0, 1]]


def test_the_overlap_is_the_probability_of_the_proposed_token():
    tokens = np.random.default_rng(0).integers(0, VOCAB, (2, 12)).astype(np.int32)
    logits = np.random.default_rng(1).normal(size=(2, 12, VOCAB)).astype(np.float32)
    mask = np.arange(12)[None] >= np.array([[3], [5]])
    p = np.exp(logits.astype(np.float64))
    p /= p.sum(axis=-1, keepdims=True)
    expected = np.zeros((2, 12))
    for row, t in np.argwhere(mask[:, 1:]):
        text = tokens[row, : t + 1].tolist()
        expected[row, t + 1] = sum(p[row, t, token] for token in searched([text], text, 2, 4, 1)[1])
    none = np.zeros((2, 12, 1), np.float32)
    run = jax.jit(NGramDrafter(VOCAB, 2, 4).loss, static_argnums=4)
    loss = run(NOTHING, tokens, PolicyOutput(logits, none, none, None), mask, LAW)
    assert expected.sum() > 1
    np.testing.assert_allclose(loss.overlap, expected, rtol=1e-5)


def rollout_of(*completions: list[int]) -> Rollout:
    tokens = np.zeros((len(completions), 4), np.int32)
    for row, completion in zip(tokens, completions, strict=True):
        row[: len(completion)] = completion
    return Rollout(jnp.asarray(tokens), jnp.array([len(completion) for completion in completions]))


def test_the_newest_completions_of_each_prompt_are_remembered():
    drafter = HistoryDrafter(VOCAB, kept=3)
    memory, remember = drafter.memory.blank(3, 4), jax.jit(drafter.memory.remember)
    assert memory.shape == (3, 3, 4) and not memory.any()
    prompts = prompts_of([0], [0], ids=(2, -1))
    memory = remember(memory, prompts, rollout_of([0, 1], [1], [2, 2], [2]))
    assert not memory[:2].any()
    assert memory[2].tolist() == [[1, 2, 0, 0], [2, 0, 0, 0], [0, 0, 0, 0]]
    memory = remember(memory, prompts_of([0], ids=(2,)), rollout_of([2, 2, 2, 2], []))
    assert memory[2].tolist() == [[3, 3, 3, 3], [0, 0, 0, 0], [1, 2, 0, 0]]
    assert drafter.memory.remember((), prompts, rollout_of([0], [0])) == ()


def test_history_holds_earlier_completions_of_the_same_prompt():
    """The prompt is part of the text, so a match may begin in it. Other prompts and filler rows find nothing."""
    drafter = HistoryDrafter(VOCAB, min_n=2, max_n=4, kept=2, siblings=0)
    remembered = jax.jit(drafter.memory.remember)(
        drafter.memory.blank(2, 4), prompts_of([0], ids=(1,)), rollout_of([1, 2, 1, 0], [1, 2, 2, 1])
    )
    params = Params({}, {}, remembered)
    prompts = prompts_of([2, 0], [2, 0], [2, 0], ids=(1, 0, -1))
    state = after_observing(drafter, started(drafter, params, prompts), jnp.array([[1]] * 3), jnp.array([1] * 3))
    assert proposed(drafter, state, 4, params) == [[2, 1, 0], [], []]
    state = after_observing(drafter, state, jnp.array([[2, 2]] * 3), jnp.array([2] * 3))
    assert proposed(drafter, state, 4, params) == [[1], [], []]
    assert proposed(drafter, started(drafter, NOTHING, prompts), 4) == [[], [], []]


def test_siblings_are_rows_of_the_same_prompt():
    drafter = HistoryDrafter(VOCAB, min_n=3, max_n=4, siblings=2)
    prompts = prompts_of(*[[2, 0]] * 5, ids=(7, 3, 7, -1, -1))
    tokens = jnp.array([[1, 2, 1, 0], [1, 0, 0, 0], [1, 0, 0, 0], [1, 2, 2, 2], [1, 0, 0, 0]])
    state = after_observing(drafter, started(drafter, NOTHING, prompts), tokens, jnp.array([4, 1, 1, 4, 1]))
    assert proposed(drafter, state, 4) == [[], [], [2, 1, 0], [], []]


def test_finished_samples_are_searched_after_their_prompt():
    """They are ordered by sample. Rows with a negative id have none. The same holds beside a draft."""
    history = HistoryDrafter(VOCAB, min_n=3, max_n=4, siblings=2)
    prompts = prompts_of([2, 0], [2, 0], ids=(3, -1))
    # Each prompt's first sample is still active, and its last exceeds the number that is kept.
    ended = jnp.array([[[0, 0, 0], [2, 1, 3], [2, 3, 3], [2, 2, 2]]] * 2)
    for drafter in (history, EitherDrafter(history, Sampled(VOCAB))):
        state = jax.jit(drafter.observe_finished)(started(drafter, NOTHING, prompts), prompts, ended)
        heard = state if drafter is history else state.lookup
        assert heard.finished[0].tolist() == [[3, 1, 2, 1, 3, 0], [3, 1, 2, 3, 3, 0]]
        assert heard.finished[1].tolist() == [[3, 1, 0, 0, 0, 0]] * 2
        state = after_observing(drafter, state, jnp.array([[1], [1]]), jnp.array([1, 1]))
        found = proposal_of(drafter, NOTHING, state, 2)
        assert found.tokens[0].tolist() == [0, 2]
        assert found.length.tolist() == ([2, 0] if drafter is history else [2, 2])


@pytest.mark.parametrize(
    "factor, offset, lengths", [(1.0, 0, [2, 3]), (0.5, 0, [1, 1]), (0.0, 3, [3, 3]), (9.0, 0, [3, 3])]
)
def test_draft_length_follows_the_length_of_the_match(factor: float, offset: int, lengths: list[int]):
    drafter = HistoryDrafter(VOCAB, min_n=1, max_n=4, factor=factor, offset=offset)
    state = started(drafter, NOTHING, prompts_of([0, 1, 0, 0, 2, 2, 0, 1], [1, 2, 2, 0, 0, 0, 1, 2, 2]))
    assert [len(tokens) for tokens in proposed(drafter, state, 3)] == lengths


class Sampled(NGramDrafter):
    """Drafter that proposes 1, 1, .. for every row, with a law that is not one-hot."""

    def propose(self, params, state, gumbel, law):
        tokens = jnp.ones(gumbel.shape[:2], jnp.int32)
        return Proposal(tokens, jnp.full(gumbel.shape, -jnp.log(3.0)), jnp.full(len(tokens), gumbel.shape[1])), state


def test_a_row_proposes_the_lookups_tokens_or_else_the_drafts():
    """Laws and lengths belong to what is proposed. Training predicts the acceptance of drafted tokens only."""
    found = one_hot_proposal(jnp.array([[0, 2], [0, 0], [0, 0]]), jnp.array([1, 0, 0]), VOCAB)
    drafted = Proposal(jnp.ones((3, 2), jnp.int32), jnp.full((3, 2, VOCAB), -jnp.log(3.0)), jnp.array([2, 2, 0]))
    choose = jax.jit(found_or_drafted)
    chosen = choose(found, drafted)
    assert chosen.tokens.tolist() == [[0, 2], [1, 1], [1, 1]] and chosen.length.tolist() == [1, 2, 0]
    np.testing.assert_allclose(np.exp(chosen.log_q[0]), [[1, 0, 0], [0, 0, 1]], rtol=1e-6)
    np.testing.assert_allclose(np.exp(chosen.log_q[1:]), np.full((2, 2, VOCAB), 1 / 3), rtol=1e-6)
    assert found.predicted is None and chosen.predicted.tolist() == [False, True, True]
    half = drafted._replace(predicted=jnp.array([True, True, False]))
    assert choose(found, half).predicted.tolist() == [False, True, False]


def test_a_model_learns_the_policys_law():
    """Its loss is soft cross-entropy at the rollout's temperature, over the completion's tokens."""
    model, rng = chain(VOCAB), np.random.default_rng(2)
    tokens = rng.integers(0, VOCAB, (2, 7)).astype(np.int32)
    logits, own = rng.normal(size=(2, 7, VOCAB)), rng.normal(size=(VOCAB, VOCAB))
    mask = np.arange(7)[None] >= np.array([[3], [5]])

    def law(x: np.ndarray) -> np.ndarray:
        p = np.exp(x / 0.7)
        return p / p.sum(axis=-1, keepdims=True)

    p, q = law(logits[:, :-1]), law(own[tokens[:, :-1]])
    output = PolicyOutput(jnp.asarray(logits, jnp.float32), *[jnp.zeros((2, 7, 1))] * 2, None)

    def loss(draft: jax.Array) -> DraftLoss:
        params = Params({}, draft)
        return ModelDrafter(model).loss(params, jnp.asarray(tokens), output, jnp.asarray(mask), SamplingLaw(0.7))

    found = jax.jit(loss)(jnp.asarray(own, jnp.float32))
    np.testing.assert_allclose(found.loss, -(p * np.log(q)).sum(axis=-1)[mask[:, 1:]].sum(), rtol=1e-5)
    expected = np.where(mask[:, 1:], np.minimum(p, q).sum(axis=-1), 0.0)
    np.testing.assert_allclose(found.overlap, np.pad(expected, ((0, 0), (1, 0))), rtol=1e-5)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: NGramDrafter(VOCAB, 3, 2), "min_n = 3:...max_n = 2"),
        (lambda: HistoryDrafter(VOCAB, 0, 2), "min_n = 0:...1...128"),
        (lambda: HistoryDrafter(VOCAB, kept=0), "kept = 0:...1"),
    ],
)
def test_options_that_make_no_sense_are_refused(make, message: str):
    with refuses(message):
        make()

"""A rollout, one round at a time: caches, log-probs, budget and counts."""

import itertools
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import cache as kv
from specjax.keys import seed_step
from specjax.rollout.admission import Carry, admit, compact
from specjax.rollout.plan import RolloutConfig
from specjax.rollout.rounds import Decoding, RoundState, round_once
from specjax.rollout.speculative import start_rollout
from specjax.sampling import SamplingLaw
from specjax.testing import CacheCheck, assert_cache_consistent, reference_law
from specjax.types import Params, Prompts, Rollout, Writer
from tests.tiny import ENUMERABLE, WANDERING

GROUP, BUDGET, K = 4, 12, 3
SEQUENCES = GROUP * len(WANDERING.prompts)
CONFIG = RolloutConfig(group_size=GROUP, max_new_tokens=BUDGET, draft_length=K, stop_tokens=WANDERING.stops)
CONFIG = replace(CONFIG, law=SamplingLaw(temperature=0.7, top_p=0.9))
RUN = seed_step(6, 1)


@pytest.fixture(scope="module")
def check() -> CacheCheck:
    world = WANDERING
    return CacheCheck(world.policy, world.drafters["eagle3"], world.params("random"), world.batch, CONFIG)


@pytest.fixture(scope="module")
def history() -> list[RoundState]:
    """Return the states after the prefill and after each round, whose caches agree with a fresh prefill.

    The rounds are ragged.
    """
    world = WANDERING
    drafter, params = world.drafters["eagle3"], world.params("random")
    states = assert_cache_consistent(world.policy, drafter, params, world.batch, CONFIG, run=RUN)
    advances = np.diff([state.emitted for state in states], axis=0)
    assert set(range(K + 1)) <= set(advances.ravel().tolist()) and len(states) > 5
    assert any(len(set(row.tolist())) > 2 for row in advances)
    return states


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_block_drafts_cache_needs_no_repair(kind: str):
    """Its rounds are ragged too."""
    world = WANDERING
    params = world.params(f"random {kind}")
    states = assert_cache_consistent(world.policy, world.drafters[kind], params, world.batch, CONFIG, run=RUN)
    assert {1, 2, 3} <= set(np.diff([state.emitted for state in states], axis=0).ravel().tolist())


def test_a_roll_back_that_is_off_by_one_is_detected(history: list[RoundState], check: CacheCheck):
    """Faults of both caches, in both directions, are found in every state that they affect."""
    for state in history[1:-1]:
        check(state)
        for by in (1, -1):
            draft = state.draft._replace(length=state.draft.length + by, waiting=state.draft.waiting - by)
            for faulty in (replace(state, prompt=state.prompt + by), replace(state, draft=draft)):
                with pytest.raises(AssertionError):
                    check(faulty)


def test_admitted_moved_or_resized_rows_have_right_caches(check: CacheCheck):
    """The caches of both networks are right after each of these operations and after the next round."""
    world, slots, few = WANDERING, 8, 4
    decoding = partial(Decoding, world.policy, world.drafters["eagle3"], config=CONFIG)
    params, prompts = world.params("random"), world.batch
    advance = jax.jit(lambda params, state: round_once(decoding(params), state, K))

    @jax.jit
    def fill(params: Params, prompts: Prompts, carry: Carry) -> Carry:
        return admit(decoding(params), carry, prompts, RUN, rows=3, drafting=jnp.bool_(True))

    carry = jax.jit(lambda params, prompts: start_rollout(decoding(params), prompts, RUN, slots))(params, prompts)
    check(carry.state)
    # As long as the longest row. A round may exceed it only by the slack.
    by = world.batch.tokens.shape[1] + BUDGET - int(carry.state.visible.max())
    narrow = advance(params, kv.resize(carry.state, -by))
    check(narrow)
    carry = carry._replace(state=kv.resize(narrow, by))
    check(carry.state)

    let_in_so_far = set()
    while carry.queue is not None and carry.queue.next_sequence < SEQUENCES:
        while carry.state.done.sum() < 3:
            carry = carry._replace(state=advance(params, carry.state))
        carry = fill(params, prompts, carry)
        check(carry.state)
        carry = carry._replace(state=advance(params, carry.state))
        let_in_so_far |= set(check(carry.state).sequence.tolist())
    assert len(let_in_so_far) > 2 * slots

    state = carry.state
    while (~state.done).sum() > few:
        state = advance(params, state)
    assert not state.done.all()
    state = compact(state, few)
    check(state)
    check(advance(params, state))


def test_finished_rows_do_not_change(history: list[RoundState]):
    for before, after in itertools.pairwise(history):
        for name in ("emitted", "pending", "done", "stopped", "drafted", "accepted", "row_rounds"):
            then, now = getattr(before, name), getattr(after, name)
            np.testing.assert_array_equal(now[before.done], then[before.done], err_msg=name)


def test_log_probs_are_those_of_a_teacher_forced_forward(history: list[RoundState]):
    """Compare the log-probs of the processed law, and those with temperature only."""
    state, expected = history[-1], np.zeros((2, SEQUENCES, BUDGET))
    written = np.arange(BUDGET) < np.asarray(state.emitted)[:, None]
    tokens, *found = (np.where(written, x[:, :BUDGET], 0) for x in (state.tokens, state.law, state.full))
    for row, length in enumerate(state.emitted.tolist()):
        logits = WANDERING.completion_logits(row // GROUP, tokens[row]).astype(np.float64)
        for t in range(length):
            for record, used in zip(expected, (CONFIG.law, SamplingLaw(CONFIG.law.temperature)), strict=True):
                record[row, t] = np.log(reference_law(logits[t], used)[tokens[row, t]])
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert (found[0] - found[1]).max() > 0.05


def coupled(drafter: str, draft: str, k: int, budget: int = BUDGET) -> Rollout:
    config = replace(CONFIG, max_new_tokens=budget, draft_length=k, verifier="coupled", law=SamplingLaw(0.8))
    return WANDERING.rollout(drafter, draft, config, RUN)


@pytest.mark.parametrize("budget", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_budget_is_the_same_when_less_than_a_draft_is_left(budget: int):
    longer, rollout = coupled("none", "none", 0), coupled("policy", "identical", K, budget)
    np.testing.assert_array_equal(rollout.tokens, longer.tokens[:, :budget])
    np.testing.assert_array_equal(rollout.lengths, np.minimum(longer.lengths, budget))
    np.testing.assert_array_equal(rollout.stopped, np.asarray(longer.stopped) & (np.asarray(longer.lengths) <= budget))
    assert int(rollout.loop_rounds.sum()) == budget - 1
    np.testing.assert_array_equal(np.asarray(rollout.drafted).sum(axis=0) > 0, np.arange(K) < budget - 1)


def test_rows_end_inside_accepted_spans():
    """With an identical draft every drafted token is accepted: rows are cut at stop tokens and at the budget.

    So is every record.
    """
    rollout = coupled("policy", "identical", 4)
    lengths, stopped = np.asarray(rollout.lengths), np.asarray(rollout.stopped)
    for record in (rollout.tokens, rollout.law, rollout.full, rollout.writer):
        assert not np.asarray(record)[np.arange(BUDGET) >= lengths[:, None]].any()
    inside = lengths - 1 - np.asarray(rollout.accepted).sum(axis=1) < np.asarray(rollout.row_rounds)
    assert (inside & stopped).any()
    assert (inside & ~stopped).any()
    plain = coupled("none", "none", 0)
    np.testing.assert_array_equal(lengths, plain.lengths)
    np.testing.assert_array_equal(stopped, plain.stopped)
    # Without rejections there are no recovered tokens. Without drafts, all tokens are the policy's.
    assert set(np.unique(rollout.writer)) == {Writer.NOBODY, Writer.POLICY, Writer.DRAFT, Writer.BONUS}
    assert (np.asarray(rollout.writer) == Writer.POLICY).sum(axis=1).tolist() == [1] * len(lengths)
    np.testing.assert_array_equal(plain.writer, (np.arange(BUDGET) < lengths[:, None]) * Writer.POLICY)


def read_counts(
    tokens: list[int], table: tuple[int, ...], stops: tuple[int, ...], k: int, budget: int
) -> tuple[np.ndarray, np.ndarray, int, np.ndarray]:
    """Return (drafted, accepted, rounds, writers) of a finished row, with a drafter that reads only the last token."""
    drafted, accepted, rounds, at = np.zeros(k, int), np.zeros(k, int), 0, 1
    wrote = np.zeros(budget, int)
    wrote[0] = Writer.POLICY
    while at < len(tokens):
        rounds += 1
        last, kept = tokens[at - 1], True
        for i in range(min(k, budget - at)):
            last = table[last]
            drafted[i] += 1
            kept = kept and at < len(tokens) and tokens[at] == last
            if kept:
                accepted[i] += 1
                wrote[at] = Writer.DRAFT
                at += 1
            if last in stops:
                break
        if at < len(tokens):
            wrote[at] = Writer.BONUS if kept else Writer.RECOVERED
        at += 1
    return drafted, accepted, rounds, wrote


def test_counts_equal_a_slow_reference():
    config = RolloutConfig(group_size=256, max_new_tokens=9, draft_length=K, stop_tokens=(2, 4))
    rollout = ENUMERABLE.rollout("table", "none", config, RUN)
    counts = [
        read_counts(
            tokens[:length].tolist(), ENUMERABLE.drafters["table"].table, config.stop_tokens, K, config.max_new_tokens
        )
        for tokens, length in zip(np.asarray(rollout.tokens), np.asarray(rollout.lengths), strict=True)
    ]
    for i, got in enumerate((rollout.drafted, rollout.accepted, rollout.row_rounds, rollout.writer)):
        np.testing.assert_array_equal(got, np.stack([row[i] for row in counts]))
    assert set(np.unique(rollout.writer)) == {*Writer} - {Writer.ENVIRONMENT}
    assert int(rollout.loop_rounds.sum()) == np.max(rollout.row_rounds)
    assert (np.asarray(rollout.accepted).sum(axis=0) > 0).all()

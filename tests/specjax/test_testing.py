"""The public assertions pass for correct code (see also the README) and fail for faulty code."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from specjax.drafters import Drafter, EitherDrafter, HistoryDrafter, NGramDrafter, NoDrafter, Proposal
from specjax.drafters.history import HistoryState
from specjax.drafters.lookup import Text
from specjax.environments import Answer, Observation, at_once
from specjax.keys import SeedStep, seed_step
from specjax.rollout.plan import RolloutConfig
from specjax.rollout.speculative import speculative_rollout
from specjax.sampling import SamplingLaw, pick
from specjax.testing import (
    PolicyDrafter,
    TableDrafter,
    assert_cache_consistent,
    assert_lossless,
    assert_same_rollout,
    tiny_policy,
)
from specjax.testing.drafters import PolicyDraftState
from specjax.testing.exact import fit
from specjax.types import Cache, Ending, Params, Policy, PolicyOutput, Prompts, PyTree, Rollout
from specjax.verify import VERIFIERS, Noise, Verdict, Verifier
from tests.refusals import refuses

POLICY, WEIGHTS = tiny_policy(vocab_size=4)
FLAT = Params(WEIGHTS, {"scale": jnp.float32(0.4)})
CONFIG = RolloutConfig(group_size=2**14, max_new_tokens=4, draft_length=2, stop_tokens=(3,))
PROMPTS = Prompts(
    tokens=jnp.array([[1, 0, 2], [2, 1, 0], [0, 2, 2]], jnp.int32),
    lengths=jnp.array([3, 1, 2], jnp.int32),
    id=jnp.array([7, 3, 5], jnp.int32),
)
FEW, GREEDY = replace(CONFIG, group_size=4, max_new_tokens=10), SamplingLaw(temperature=0.0)


def greedy_bonus(
    policy: Policy, drafter: Drafter, params: Params, prompts: Prompts, seed_step: SeedStep, config: RolloutConfig
) -> Rollout:
    """Faulty rollout function: the bonus token is the policy's likeliest."""
    assert isinstance(config.verifier, str)
    sound = VERIFIERS[config.verifier]

    def verify(log_p: Array, log_q: Array, draft: Array, length: Array, noise: Noise) -> Verdict:
        accepted, token = sound.verify(log_p, log_q, draft, length, noise)
        best = jnp.argmax(log_p[:, -1], axis=-1).astype(jnp.int32)
        return Verdict(accepted, jnp.where((accepted == length) & (length > 0), best, token))

    faulty = replace(config, verifier=Verifier(sound.noise, verify))
    return speculative_rollout(policy, drafter, params, prompts, seed_step, faulty)


class Liar(PolicyDrafter):
    """Faulty drafter that reports a sharper law than it sampled from."""

    def propose(
        self, params: Params, state: PolicyDraftState, gumbel: Array, law: SamplingLaw
    ) -> tuple[Proposal, PolicyDraftState]:
        proposal, state = super().propose(params, state, gumbel, law)
        sharper = 2 * proposal.log_q
        total = jnp.log(jnp.sum(jnp.exp(sharper), axis=-1, keepdims=True))
        return proposal._replace(log_q=sharper - total), state


class Stopper(PolicyDrafter):
    """Faulty drafter that drops a sampled token if it is not confident in it."""

    def propose(
        self, params: Params, state: PolicyDraftState, gumbel: Array, law: SamplingLaw
    ) -> tuple[Proposal, PolicyDraftState]:
        proposal, state = super().propose(params, state, gumbel, law)
        sure = pick(proposal.log_q, proposal.tokens) > jnp.log(0.3)
        return proposal._replace(length=jnp.sum(jnp.cumprod(sure, axis=1), axis=1, dtype=jnp.int32)), state


class Behind(PolicyDrafter):
    """Faulty drafter that rolls its cache back by one position too few."""

    def observe(self, state: PolicyDraftState, features: Array, tokens: Array, emitted: Array) -> PolicyDraftState:
        late = jnp.where(emitted > 1, 1, 0) if tokens.shape[1] > 1 else 0
        return super().observe(state._replace(length=state.length + late), features, tokens, emitted)


@pytest.mark.parametrize(
    "drafter, rollout_fn",
    [
        (PolicyDrafter(POLICY), greedy_bonus),
        (Liar(POLICY), speculative_rollout),
        pytest.param(Stopper(POLICY), speculative_rollout, marks=pytest.mark.slow),
    ],
)
def test_faults_that_change_the_law_fail_with_the_evidence(drafter: Drafter, rollout_fn: object):
    evidence = r"^.*chi-square .*32768 .*p = .*1e-06.* (0\.9|1)"
    with pytest.raises(AssertionError, match=evidence):
        assert_lossless(POLICY, drafter, FLAT, CONFIG, rollout_fn=rollout_fn, draws=2**15, total_variation=0.05)  # pyright: ignore[reportArgumentType]


def test_tests_that_cannot_prove_anything_are_refused():
    proof = POLICY, NoDrafter(), Params(WEIGHTS, {})
    with refuses("draws = 16384: ...0.01...0.00"):
        assert_lossless(*proof, CONFIG, draws=1000, total_variation=0.01)
    with refuses("max_new_tokens = 12: ...3...100000"):
        assert_lossless(*proof, replace(CONFIG, max_new_tokens=12))
    with refuses("verifier = block: ...coupled...temperature"):
        assert_same_rollout(*proof, PROMPTS, replace(FEW, verifier="block"))


class Silent(TableDrafter):
    """Drafter that never proposes a token."""

    def propose(self, params: Params, state: Array, gumbel: Array, law: SamplingLaw) -> tuple[Proposal, Array]:
        proposal, state = super().propose(params, state, gumbel, law)
        return proposal._replace(length=jnp.zeros_like(proposal.length)), state


def test_a_test_without_proposals_is_refused():
    drafter, message = Silent((1, 2, 3, 0)), "draft_length = 2: "
    with refuses(message):
        assert_lossless(POLICY, drafter, FLAT, CONFIG, draws=2**15, total_variation=0.05)
    with refuses(message):
        assert_same_rollout(POLICY, drafter, FLAT, PROMPTS, replace(FEW, verifier="coupled"))


@pytest.mark.parametrize(
    "drafter, config",
    [
        pytest.param(PolicyDrafter(POLICY), replace(FEW, verifier="coupled"), marks=pytest.mark.slow),
        (PolicyDrafter(POLICY), replace(FEW, verifier=VERIFIERS["coupled"])),
        pytest.param(TableDrafter((1, 2, 3, 0)), replace(FEW, verifier="block", law=GREEDY), marks=pytest.mark.slow),
    ],
)
def test_equal_tokens_pass(drafter: Drafter, config: RolloutConfig):
    rollout = assert_same_rollout(POLICY, drafter, FLAT, PROMPTS, config, run=seed_step(1, 2))
    assert np.sum(rollout.accepted) > 0


def test_different_tokens_are_found_with_their_first_position():
    config = replace(FEW, verifier="coupled")
    with pytest.raises(AssertionError, match=r"row \d+ "):
        assert_same_rollout(POLICY, PolicyDrafter(POLICY), FLAT, PROMPTS, config, rollout_fn=greedy_bonus)


def late(
    params: PyTree, tokens: Array, start: Array, cache: Cache | None = None, logits_at: Array | None = None
) -> PolicyOutput:
    """Faulty policy that writes verified tokens one position too late."""
    return POLICY.apply(
        params, tokens, start + (1 if tokens.shape[1] == CONFIG.draft_length + 1 else 0), cache, logits_at
    )


NGRAM = NGramDrafter(4, min_n=1, max_n=3)


class Mute(NGramDrafter):
    """Faulty drafter that observes only one token of each verification."""

    def observe(self, state: Text, features: Array, tokens: Array, emitted: Array) -> Text:
        return super().observe(state, features, tokens, jnp.minimum(emitted, 1))


class Misspelt(HistoryDrafter):
    """Faulty drafter that stores other tokens than those emitted."""

    def observe(self, state: HistoryState, features: Array, tokens: Array, emitted: Array) -> HistoryState:
        return super().observe(state, features, (tokens + 1) % 4, emitted)


POLICY_DRAFTER = PolicyDrafter(POLICY)
SOUND = {
    "history": (HistoryDrafter(4, min_n=1, siblings=2), 2),
    "either": (EitherDrafter(NGRAM, POLICY_DRAFTER), 2),
    "none": (NoDrafter(), 0),
    "at draft length 0": (POLICY_DRAFTER, 0),
}


@pytest.mark.parametrize("name", SOUND)
def test_correct_caches_and_texts_and_drafters_without_state_pass(name: str):
    drafter, k = SOUND[name]
    states = assert_cache_consistent(POLICY, drafter, FLAT, PROMPTS, replace(FEW, draft_length=k))
    assert len(states) > 4 and states[-1].done.all()


OFF_BY_ONE = r"cache 0: k of 0 \.\. \d+"
FAULTY = {
    "policy": (replace(POLICY, apply=late), POLICY_DRAFTER, f"policy {OFF_BY_ONE}"),
    "draft": (POLICY, Behind(POLICY), f"draft {OFF_BY_ONE}"),
    "draft beside a lookup": (POLICY, EitherDrafter(NGRAM, Behind(POLICY)), f"draft {OFF_BY_ONE}"),
    "mute": (POLICY, Mute(4, min_n=1), r"the draft's text is \d+ tokens long: \d+ are committed"),
    "mute beside a draft": (POLICY, EitherDrafter(Mute(4, min_n=1), POLICY_DRAFTER), r"the draft's text is \d+ tokens"),
    "misspelt": (POLICY, Misspelt(4, min_n=1), "the draft's text: differ"),
}


@pytest.mark.parametrize("name", FAULTY)
def test_a_wrong_cache_or_text_fails(name: str):
    policy, drafter, evidence = FAULTY[name]
    wide = replace(PROMPTS, tokens=jnp.pad(PROMPTS.tokens, ((0, 0), (0, 1))))
    with pytest.raises(AssertionError, match=rf"(?m)row \d+, {evidence}"):
        assert_cache_consistent(policy, drafter, FLAT, wide, FEW)


@pytest.mark.parametrize("drafter", [TableDrafter((1, 2, 3, 0)), EitherDrafter(NGRAM, TableDrafter((1, 2, 3, 0)))])
def test_a_state_that_cannot_be_compared_is_refused(drafter: Drafter):
    with refuses("draft state of type ndarray: "):
        assert_cache_consistent(POLICY, drafter, FLAT, PROMPTS, FEW)


def test_a_law_of_one_completion_allows_no_other():
    only = {(1, 2): 1.0}
    sound, faulty = fit({(1, 2): 1000}, only), fit({(1, 2): 999, (1, 3): 1}, only)
    assert sound.passes and not faulty.passes
    assert sound.power == pytest.approx(1 - 0.98**1000)


@dataclass(frozen=True)
class Counter:
    """An environment in JAX that answers with a count, and ends at three tokens 2."""

    width: int = 1

    def begin(self, prompts: Prompts, keys: Array) -> PyTree:
        return jnp.zeros(len(keys), jnp.int32)

    def step(self, state: PyTree, tokens: Array, start: Array, end: Array) -> tuple[PyTree, Observation]:
        written = jnp.arange(tokens.shape[1])[None] < end[:, None]
        twos = jnp.sum(written & (tokens == 2), axis=1, dtype=jnp.int32)
        answer, rewards = (twos + state) % 3, jnp.zeros(len(state), jnp.float32)
        return state + 1, Observation(answer[:, None], jnp.ones_like(state), twos == 3, rewards)


class HostCounter:
    """The same on the host."""

    width = 1

    def begin(self, problem: int, seed: int) -> "HostCounterEpisode":
        return HostCounterEpisode()


class HostCounterEpisode:
    def __init__(self) -> None:
        self._turn = self._seen = 0

    def step(self, turn: Sequence[int]) -> Future[Answer]:
        self._seen += turn.count(2)
        answer = (self._seen + self._turn) % 3
        self._turn, ends = self._turn + 1, self._seen == 3
        self._seen += answer == 2
        return at_once(Answer([answer], ending=Ending.STOP if ends else Ending.GOING))

    def end(self) -> Future[float]:
        return at_once(0.0)


@pytest.mark.parametrize("environment", [Counter(), HostCounter()])
def test_rollouts_with_an_environment_are_proven(environment: Any):
    config = replace(CONFIG, max_new_tokens=5, environment=environment, turns=3, turn_tokens=3)
    drafter = TableDrafter((1, 2, 0, 0))
    assert_lossless(POLICY, drafter, Params(WEIGHTS, {}), config, draws=2**15, total_variation=0.05)
    few = replace(FEW, verifier="coupled", environment=environment, turns=3)
    rollout = assert_same_rollout(POLICY, drafter, Params(WEIGHTS, {}), PROMPTS, few)
    assert rollout.sampled is not None and np.sum(rollout.lengths) > np.sum(rollout.sampled)


def test_an_environment_that_is_not_the_one_of_the_law_fails(monkeypatch: pytest.MonkeyPatch):
    config = replace(CONFIG, max_new_tokens=5, draft_length=0, environment=Counter(), turns=3)
    proof, sound = (POLICY, NoDrafter(), Params(WEIGHTS, {}), config), Counter.step

    def forgets(self: Counter, state: PyTree, *args: Array) -> tuple[PyTree, Observation]:
        return sound(self, jnp.where(len(state) > 1, 0, state), *args)

    monkeypatch.setattr(Counter, "step", forgets)
    with pytest.raises(AssertionError, match="not lossless"):
        assert_lossless(*proof, draws=2**15, total_variation=0.05)

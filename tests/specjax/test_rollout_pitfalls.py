"""The ways to lose the law that are known from the field, put in on purpose: each must be noticed.

One program holds every fault of a verifier and of a drafter behind a switch, so that the sound code and the faulty
differ in nothing else.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from enum import IntEnum, auto

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from specjax import rounds as rounds_module
from specjax.drafters import Drafter, Proposal
from specjax.keys import Purpose, SeedStep, gumbels, seed_step
from specjax.plan import RolloutConfig
from specjax.rollout import speculative_rollout
from specjax.sampling import SamplingLaw, pick, sample
from specjax.types import Params, Prompts, Rollout
from specjax.verify import VERIFIERS, AcceptLaw, Noise, Verdict, Verifier, accept_law, draw
from tests.doubles import PolicyDrafter, PolicyDraftState
from tests.exact import LEVEL, completion_law, count_completions, fit
from tests.tiny import ENUMERABLE as WORLD

BUDGET, DRAWS, K = 5, 32_768, 3
PLAIN = SamplingLaw()
REJECTION = VERIFIERS["rejection"]


class Fault(IntEnum):
    """Where a verifier departs from `rejection`."""

    NONE = 0
    FIRST_TOKEN_GREEDY = auto()
    ACCEPTS_ALL = auto()
    RECOVERS_FROM_POLICY = auto()
    BONUS_GREEDY = auto()
    RECOVERS_WITH_DRAFT_NOISE = auto()
    ACCEPTS_WITH_DRAFT_NOISE = auto()
    ACCEPTS_AS_ONE_HOT = auto()
    RECOVERS_AS_ONE_HOT = auto()


class Tamper(IntEnum):
    """What happens to a sampled proposal before it is verified."""

    NONE = 0
    ONE_HOT = auto()
    GREEDY_ONE_HOT = auto()
    CUT_AFTER_UNSURE = auto()
    FIRST_OF_TWO = auto()
    GREEDY = auto()
    CUT_BEFORE_UNSURE = auto()
    BETTER_OF_TWO = auto()
    LOOKUP_BY_PREFIX = auto()
    LOOKUP_WHERE_UNSURE = auto()


LOSSLESS = {
    *(Tamper.NONE, Tamper.ONE_HOT, Tamper.GREEDY_ONE_HOT, Tamper.CUT_AFTER_UNSURE, Tamper.FIRST_OF_TWO),
    Tamper.LOOKUP_BY_PREFIX,
}


def one_hot(tokens: Array, vocab: int) -> Array:
    return jnp.where(tokens[..., None] == jnp.arange(vocab).reshape((1,) * tokens.ndim + (-1,)), 0.0, -jnp.inf)


def faulty(fault: Array) -> Verifier:
    def noise(keys: Array, start: Array, k: int, vocab: int) -> Noise:
        drawn = REJECTION.noise(keys, start, k, vocab)
        if not k:
            return drawn
        first = drawn.draft[:, 0]
        largest = jnp.max(first, axis=-1)
        return drawn._replace(
            emit=jnp.where(fault == Fault.RECOVERS_WITH_DRAFT_NOISE, first[:, None], drawn.emit),
            # The largest of V Gumbels, turned into the uniform that has its rank.
            uniform=jnp.where(
                fault == Fault.ACCEPTS_WITH_DRAFT_NOISE, jnp.exp(-vocab * jnp.exp(-largest)), drawn.uniform
            ),
        )

    def verify(log_p: Array, log_q: Array, draft: Array, length: Array, noise: Noise) -> Verdict:
        law = accept_law(log_p, log_q, draft, length)
        exact = accept_law(log_p, one_hot(draft, log_p.shape[-1]), draft, length)
        law = AcceptLaw(
            jnp.where(fault == Fault.ACCEPTS_AS_ONE_HOT, exact.survival, law.survival),
            law.log_p,
            jnp.where(fault == Fault.RECOVERS_AS_ONE_HOT, exact.log_q, law.log_q),
            length,
        )
        accepted, token = draw(law, noise)
        accepted = jnp.where(fault == Fault.ACCEPTS_ALL, length, accepted)
        row = jnp.take_along_axis(log_p, accepted[:, None, None], axis=1)[:, 0]
        greedy = jnp.argmax(row, axis=-1).astype(jnp.int32)
        full = accepted == length
        token = jnp.where(fault == Fault.ACCEPTS_ALL, sample(row, noise.emit[:, 0]), token)
        token = jnp.where((fault == Fault.FIRST_TOKEN_GREEDY) & (draft.shape[1] == 0), greedy, token)
        token = jnp.where((fault == Fault.BONUS_GREEDY) & full & (draft.shape[1] > 0), greedy, token)
        token = jnp.where((fault == Fault.RECOVERS_FROM_POLICY) & ~full, sample(row, noise.emit[:, 0]), token)
        return Verdict(accepted, token)

    return Verifier(noise, verify)


class TamperingDrafter(PolicyDrafter):
    """Tampers with its proposals as `params.draft["tamper"]` says."""

    def propose(
        self, params: Params, state: PolicyDraftState, gumbel: Array, law: SamplingLaw
    ) -> tuple[Proposal, PolicyDraftState]:
        drawn, state = super().propose(params, state, gumbel, law)
        unsure = pick(drawn.log_q, drawn.tokens) < jnp.log(0.3)
        before = jnp.where(unsure.any(axis=1), jnp.argmax(unsure, axis=1), K).astype(jnp.int32)
        first, other = drawn.tokens[:, 0], sample(drawn.log_q[:, 0], gumbel[:, 1])
        better = jnp.where(pick(drawn.log_q[:, 0], first) >= pick(drawn.log_q[:, 0], other), first, other)
        best = jnp.argmax(drawn.log_q[:, 0], axis=-1).astype(jnp.int32)

        def single(token: Array) -> Proposal:
            return Proposal(drawn.tokens.at[:, 0].set(token), drawn.log_q, jnp.ones_like(drawn.length))

        def certain(proposal: Proposal) -> Proposal:
            return proposal._replace(log_q=one_hot(proposal.tokens, WORLD.vocab))

        def looked_up(where: Array) -> Proposal:
            """The lookup's token, always 1, where so wanted, and the draft's own elsewhere; each with its law."""
            return Proposal(
                jnp.where(where[:, None], 1, drawn.tokens),
                jnp.where(where[:, None, None], one_hot(jnp.ones_like(drawn.tokens), WORLD.vocab), drawn.log_q),
                jnp.where(where, 1, drawn.length),
            )

        proposals = {
            Tamper.NONE: drawn,
            Tamper.ONE_HOT: certain(drawn),
            Tamper.GREEDY_ONE_HOT: certain(single(best)),
            Tamper.CUT_AFTER_UNSURE: drawn._replace(length=jnp.minimum(before + 1, K)),
            Tamper.FIRST_OF_TWO: single(first),
            Tamper.GREEDY: single(best),
            Tamper.CUT_BEFORE_UNSURE: drawn._replace(length=before),
            Tamper.BETTER_OF_TWO: single(better),
            Tamper.LOOKUP_BY_PREFIX: looked_up(state.length % 2 == 0),
            Tamper.LOOKUP_WHERE_UNSURE: looked_up(unsure[:, 0]),
        }
        choices = [proposals[tamper] for tamper in Tamper]
        return jax.tree.map(lambda *x: jax.lax.select_n(params.draft["tamper"], *x), *choices), state


def config(law: SamplingLaw, draws: int = DRAWS) -> RolloutConfig:
    return RolloutConfig(group_size=draws, max_new_tokens=BUDGET, draft_length=K, law=law, stop_tokens=WORLD.stops)


def rollouts(
    drafter: Drafter, config: RolloutConfig, verifier: Callable[[Array], Verifier]
) -> Callable[[Params, int, int], Rollout]:
    """(params, fault, step) -> rollout, with `verifier(fault)` in the place of `rejection`."""

    @jax.jit
    def program(params: Params, prompts: Prompts, fault: Array, run: SeedStep) -> Rollout:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(VERIFIERS, "rejection", verifier(fault))
            return speculative_rollout(WORLD.policy, drafter, params, prompts, run, config)

    return lambda params, fault, step: program(params, WORLD.batch, jnp.int32(fault), seed_step(2, step))


def p_value(rollout: Rollout, law: SamplingLaw) -> float:
    cells = completion_law(WORLD.logits, WORLD.prompts[0], WORLD.vocab, WORLD.stops, BUDGET, law)
    return fit(count_completions(rollout), cells).p_value


@pytest.fixture(scope="module")
def switched() -> Callable[[Fault, Tamper], Rollout]:
    program = rollouts(TamperingDrafter(WORLD.policy), config(PLAIN), faulty)
    draft = WORLD.draft("flat")

    @functools.cache
    def run(fault: Fault, tamper: Tamper) -> Rollout:
        params = replace(WORLD.params("flat"), draft={**draft, "tamper": jnp.int32(tamper)})
        return program(params, fault, 100 * fault + tamper)

    return run


@pytest.mark.parametrize("fault", Fault, ids=lambda fault: fault.name)
def test_a_wrong_law_at_any_emission_site_is_noticed(switched: Callable[[Fault, Tamper], Rollout], fault: Fault):
    assert (p_value(switched(fault, Tamper.NONE), PLAIN) > LEVEL) == (fault == Fault.NONE)


@pytest.mark.parametrize("tamper", Tamper, ids=lambda tamper: tamper.name)
def test_proposals_that_are_not_what_they_claim_are_noticed(
    switched: Callable[[Fault, Tamper], Rollout], tamper: Tamper
):
    assert (p_value(switched(Fault.NONE, tamper), PLAIN) > LEVEL) == (tamper in LOSSLESS)


def test_a_sampled_draft_verified_as_one_hot_keeps_the_law_and_costs_acceptance(
    switched: Callable[[Fault, Tamper], Rollout],
):
    """Whatever token is verified, accepting it with p(token) and else drawing from the rest of p gives p."""
    sampled, certain = (
        np.asarray(switched(Fault.NONE, tamper).accepted).sum() for tamper in (Tamper.NONE, Tamper.ONE_HOT)
    )
    assert certain < 0.8 * sampled


def nucleus_before_temperature(logits: Array, law: SamplingLaw) -> Array:
    cut = REAL_LAW(logits, replace(law, temperature=1.0))
    return REAL_LAW(jnp.where(cut > -jnp.inf, logits, -jnp.inf), SamplingLaw(temperature=law.temperature))


REAL_LAW = rounds_module.process_logits


def test_a_nucleus_taken_before_the_temperature_is_noticed(monkeypatch: pytest.MonkeyPatch):
    law = SamplingLaw(temperature=0.7, top_p=0.9)
    monkeypatch.setattr(rounds_module, "process_logits", nucleus_before_temperature)
    program = rollouts(PolicyDrafter(WORLD.policy), config(law), faulty)
    assert p_value(program(WORLD.params("flat"), Fault.NONE, 0), law) < LEVEL


def block(by_position: Array) -> Verifier:
    """Block verification (arXiv 2403.10444), its noise keyed by the round's start or by absolute position alone."""

    def noise(keys: Array, start: Array, k: int, vocab: int) -> Noise:
        def each(purpose: Purpose, count: int, vocab: int) -> Array:
            at = start[:, None] + jnp.arange(count)[None]
            of_round = gumbels(keys, start, purpose, count * vocab).reshape(len(keys), count, vocab)
            return jnp.where(by_position == 1, gumbels(keys, at, purpose, vocab), of_round)

        return Noise(
            draft=each(Purpose.DRAFT, k, vocab),
            # A Gumbel's distribution function makes it a uniform.
            uniform=jnp.exp(-jnp.exp(-each(Purpose.ACCEPT, k, 1)))[..., 0],
            emit=each(Purpose.RESIDUAL, k + 1, vocab),
        )

    def verify(log_p: Array, log_q: Array, draft: Array, length: Array, noise: Noise) -> Verdict:
        p, q, k = jnp.exp(log_p), jnp.exp(log_q), draft.shape[1]
        ratios = jnp.exp(pick(log_p[:, :k], draft) - pick(log_q, draft))
        prefix, ends, laws = jnp.ones(len(draft)), jnp.zeros(len(draft), jnp.int32), []
        for i in range(k + 1):
            if i:
                prefix = jnp.minimum(1.0, prefix * ratios[:, i - 1])
            laws.append(jnp.maximum(prefix[:, None] * p[:, i] - q[:, i], 0.0) if i < k else p[:, k])
            if i:
                left = laws[i].sum(axis=-1)
                threshold = left / jnp.maximum(left + 1.0 - prefix, 1e-30) if i < k else prefix
                ends = jnp.where(noise.uniform[:, i - 1] < threshold, i, ends)
        law, emit = (
            jnp.take_along_axis(x, ends[:, None, None], axis=1)[:, 0] for x in (jnp.stack(laws, axis=1), noise.emit)
        )
        return Verdict(ends, sample(jnp.log(law), emit))

    return Verifier(noise, verify)


@pytest.fixture(scope="module")
def block_rollouts() -> Callable[[Params, int, int], Rollout]:
    return rollouts(PolicyDrafter(WORLD.policy), config(PLAIN, draws=3 * DRAWS), block)


@pytest.mark.parametrize("by_position", [0, 1])
def test_block_verification_with_noise_keyed_by_position_alone_is_noticed(
    block_rollouts: Callable[[Params, int, int], Rollout], by_position: int
):
    rollout = block_rollouts(WORLD.params("flat"), by_position, 7)
    assert (p_value(rollout, PLAIN) > LEVEL) == (not by_position)

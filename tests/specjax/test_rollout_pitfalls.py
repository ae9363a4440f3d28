"""Known mistakes that change the output distribution, planted on purpose. The tests must detect each one.

One program contains all faults of verifiers and drafters. A switch selects one, so that correct and faulty code differ
in nothing else.
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

from specjax.drafters import Drafter, Proposal
from specjax.keys import Purpose, SeedStep, gumbels, seed_step
from specjax.rollout import rounds as rounds_module
from specjax.rollout.plan import RolloutConfig
from specjax.rollout.speculative import speculative_rollout
from specjax.sampling import SamplingLaw, pick, sample
from specjax.testing.drafters import PolicyDrafter, PolicyDraftState
from specjax.testing.exact import LEVEL, completion_law, count_completions, fit
from specjax.types import Params, Prompts, Rollout
from specjax.verify import VERIFIERS, AcceptLaw, Noise, Verdict, Verifier, accept_law, block_law, draw
from tests.tiny import ENUMERABLE as WORLD

BUDGET, DRAWS, K = 5, 32_768, 3
PLAIN = SamplingLaw()
REJECTION = VERIFIERS["rejection"]


class Fault(IntEnum):
    """Faults of a verifier, compared with `rejection`."""

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
    """Ways to tamper with a sampled proposal before it is verified."""

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
            # The largest of V Gumbels, mapped to a uniform by its distribution function.
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
            law.log_weight,
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
    """Drafter whose proposals are tampered with as set by `params.draft["tamper"]`."""

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
            """Return the lookup's token, always 1, in the rows `where`, else the draft's, each with its law."""
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
    """Return a program (params, fault, step) -> rollout, verified by `verifier(fault)`."""

    @jax.jit
    def program(params: Params, prompts: Prompts, fault: Array, run: SeedStep) -> Rollout:
        own = replace(config, verifier=verifier(fault))
        return speculative_rollout(WORLD.policy, drafter, params, prompts, run, own)

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
def test_a_wrong_law_at_any_emission_site_is_detected(switched: Callable[[Fault, Tamper], Rollout], fault: Fault):
    assert (p_value(switched(fault, Tamper.NONE), PLAIN) > LEVEL) == (fault == Fault.NONE)


@pytest.mark.parametrize("tamper", Tamper, ids=lambda tamper: tamper.name)
def test_wrong_proposals_are_detected(switched: Callable[[Fault, Tamper], Rollout], tamper: Tamper):
    assert (p_value(switched(Fault.NONE, tamper), PLAIN) > LEVEL) == (tamper in LOSSLESS)


def test_a_sampled_draft_verified_as_one_hot_keeps_the_law_and_costs_acceptance(
    switched: Callable[[Fault, Tamper], Rollout],
):
    """Accepting a token with probability p(token), otherwise drawing from the other tokens of p, gives p."""
    sampled, certain = (
        np.asarray(switched(Fault.NONE, tamper).accepted).sum() for tamper in (Tamper.NONE, Tamper.ONE_HOT)
    )
    assert certain < 0.8 * sampled


def nucleus_before_temperature(logits: Array, law: SamplingLaw) -> Array:
    cut = REAL_LAW(logits, replace(law, temperature=1.0))
    return REAL_LAW(jnp.where(cut > -jnp.inf, logits, -jnp.inf), SamplingLaw(temperature=law.temperature))


REAL_LAW = rounds_module.process_logits


@pytest.mark.slow
def test_a_nucleus_computed_before_the_temperature_is_detected(monkeypatch: pytest.MonkeyPatch):
    law = SamplingLaw(temperature=0.7, top_p=0.9)
    monkeypatch.setattr(rounds_module, "process_logits", nucleus_before_temperature)
    program = rollouts(PolicyDrafter(WORLD.policy), config(law), faulty)
    assert p_value(program(WORLD.params("flat"), Fault.NONE, 0), law) < LEVEL


class BlockFault(IntEnum):
    """Faults of a verifier, compared with `block`."""

    NONE = 0
    NOISE_BY_POSITION = auto()
    STOPS_AT_THE_FIRST_FAILURE = auto()


def faulty_block(fault: Array) -> Verifier:
    """Return a faulty block verifier with one uniform per position, as in the paper, so that it can be keyed by it."""

    def noise(keys: Array, start: Array, k: int, vocab: int) -> Noise:
        def each(purpose: Purpose, count: int, vocab: int) -> Array:
            at = start[:, None] + jnp.arange(count)[None]
            of_round = gumbels(keys, start, purpose, count * vocab).reshape(len(keys), count, vocab)
            return jnp.where(fault == BlockFault.NOISE_BY_POSITION, gumbels(keys, at, purpose, vocab), of_round)

        # A Gumbel's distribution function maps it to a uniform. These Gumbels come after those of the tokens.
        eta = jnp.exp(-jnp.exp(-each(Purpose.ACCEPT, k, 1)))
        rest = each(Purpose.RESIDUAL, k + 1, vocab)
        emit = jnp.concatenate([rest, jnp.pad(eta, ((0, 0), (0, 1), (0, 0)))], axis=-1)
        return Noise(draft=each(Purpose.DRAFT, k, vocab), uniform=jnp.zeros(len(keys)), emit=emit)

    def verify(log_p: Array, log_q: Array, draft: Array, length: Array, noise: Noise) -> Verdict:
        law = block_law(log_p, log_q, draft, length)
        stop = law.stop()
        at_most = jnp.cumsum(stop, axis=1)
        below = noise.emit[:, :-1, -1] < jnp.where(at_most > 0, stop / at_most, 1.0)[:, 1:]
        last = jnp.max(jnp.where(below, jnp.arange(1, draft.shape[1] + 1)[None], 0), axis=1, initial=0)
        unbroken = jnp.sum(jnp.cumprod(below, axis=1), axis=1)
        accepted = jnp.where(fault == BlockFault.STOPS_AT_THE_FIRST_FAILURE, unbroken, last).astype(jnp.int32)
        emit = jnp.take_along_axis(noise.emit[..., :-1], accepted[:, None, None], axis=1)[:, 0]
        return Verdict(accepted, sample(law.residual(accepted), emit))

    return Verifier(noise, verify)


@pytest.fixture(scope="module")
def block_rollouts() -> Callable[[Params, int, int], Rollout]:
    return rollouts(PolicyDrafter(WORLD.policy), config(PLAIN, draws=3 * DRAWS), faulty_block)


@pytest.mark.slow
@pytest.mark.parametrize("fault", BlockFault, ids=lambda fault: fault.name)
def test_a_faulty_block_verification_is_detected(
    block_rollouts: Callable[[Params, int, int], Rollout], fault: BlockFault
):
    """One fault keys noise only by absolute position, so the next round reuses noise that decided where to stop."""
    rollout = block_rollouts(WORLD.params("flat"), fault, 7)
    assert (p_value(rollout, PLAIN) > LEVEL) == (fault == BlockFault.NONE)

"""Faults around the sampling law: a cut that is added is ignored nowhere, and an edited draw is noticed."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from launch.cli.recipes import load_recipe
from launch.diagnosis.diagnose import diagnostic_run
from specjax.rollout.plan import RolloutConfig
from specjax.sampling import SamplingLaw, full_log_probs, process_logits, sample
from specjax.testing import assert_verifier_lossless, exact, reference_law
from specjax.train.config import TrainConfig
from specjax.verify import VERIFIERS, AcceptLaw, Noise, Verdict, accept_law, block_law, draw
from specjax.verify import law as law_module
from tests.refusals import refuses

LOGITS = jnp.log(jnp.array([0.4, 0.3, 0.2, 0.1]))
# A value of each cut that removes tokens of these logits.
CUTS = {"top_k": 2, "top_p": 0.5, "min_p": 0.6}


@dataclass(frozen=True)
class WithBan(SamplingLaw):
    """A law with a cut of its own. banned: token that is never drawn."""

    banned: int | None = None


def with_ban(logits: Array, law: WithBan) -> Array:
    allowed = jnp.arange(logits.shape[-1]) != (-1 if law.banned is None else law.banned)
    return full_log_probs(jnp.where(allowed, process_logits(logits, law), -jnp.inf), law)


def test_row_60_each_field_of_the_law_cuts() -> None:
    assert {field.name for field in fields(SamplingLaw)} == {"temperature", *CUTS}
    for name, value in CUTS.items():
        law = SamplingLaw(**{name: value})
        assert law.truncates and law.without_cuts() == SamplingLaw()
        assert (np.asarray(process_logits(LOGITS, law)) == -np.inf).any(), name


def test_row_60_an_added_cut_is_ignored_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    law = WithBan(0.7, banned=0)
    assert law.truncates and not WithBan(0.7).truncates and WithBan(0.0).truncates
    assert law.without_cuts() == WithBan(0.7) and WithBan(0.0, banned=0).without_cuts() == WithBan(1.0)
    with refuses("rollout.law = ...allow_truncated_law"):
        TrainConfig(rollout=RolloutConfig(law=law))
    monkeypatch.setattr(exact, "process_logits", with_ban)
    assert reference_law(np.asarray(LOGITS), law)[0] == 0 < reference_law(np.asarray(LOGITS), WithBan(0.7))[0]
    tiny = load_recipe("tiny")
    run = diagnostic_run(replace(tiny, rollout=replace(tiny.rollout, law=law), allow_truncated_law=True))
    assert run.rollout.law == WithBan(0.7)


def accepts_two_less(law: AcceptLaw, noise: Noise) -> Verdict:
    accepted = jnp.maximum(jnp.sum(noise.uniform[:, None] < law.survival, axis=1, dtype=jnp.int32) - 2, 0)
    return Verdict(accepted, sample(law.residual(accepted), noise.emit[:, 0]))


def accepts_two_less_after_the_token(law: AcceptLaw, noise: Noise) -> Verdict:
    accepted, token = draw(law, noise)
    return Verdict(jnp.maximum(accepted - 2, 0), token)


def accepts_at_most_one(law: AcceptLaw, noise: Noise) -> Verdict:
    accepted = jnp.minimum(draw(law, noise).accepted, 1)
    return Verdict(accepted, sample(law.residual(accepted), noise.emit[:, 0]))


def accepts_one_more(law: AcceptLaw, noise: Noise) -> Verdict:
    accepted = jnp.minimum(draw(law, noise).accepted + 1, law.length)
    return Verdict(accepted, sample(law.residual(accepted), noise.emit[:, 0]))


def compares_with_the_square(law: AcceptLaw, noise: Noise) -> Verdict:
    return draw(law._replace(survival=law.survival**2), noise)


def draws_from_the_policy(law: AcceptLaw, noise: Noise) -> Verdict:
    accepted = draw(law, noise).accepted
    return Verdict(
        accepted, sample(jnp.take_along_axis(law.log_p, accepted[:, None, None], axis=1)[:, 0], noise.emit[:, 0])
    )


def sharpens_the_residual(law: AcceptLaw, noise: Noise) -> Verdict:
    accepted = draw(law, noise).accepted
    return Verdict(accepted, sample(1.01 * law.residual(accepted), noise.emit[:, 0]))


EDITS = (
    *(accepts_two_less, accepts_two_less_after_the_token, accepts_at_most_one, accepts_one_more),
    *(compares_with_the_square, draws_from_the_policy, sharpens_the_residual),
)


@pytest.mark.parametrize("edit", EDITS)
def test_row_62_an_edited_draw_is_noticed(edit: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(law_module, "draw", edit)
    with pytest.raises(AssertionError, match="not lossless"):
        assert_verifier_lossless(accept_law, vocab=2, draft_length=2, trees=1)


def test_row_62_what_draw_says_instead_is_lossless() -> None:
    def two_less(log_p: Array, log_q: Array, draft: Array, length: Array) -> AcceptLaw:
        return block_law(log_p, log_q, draft, jnp.maximum(length - 2, 0))

    assert_verifier_lossless(two_less, vocab=2, draft_length=3, trees=1)


def test_row_62_the_verifiers_draw_with_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the proof is of the function that rollouts call."""
    called = []
    monkeypatch.setattr(law_module, "draw", lambda law, noise: called.append(law) or draw(law, noise))
    log_p, ints = jnp.zeros((1, 2, 2)), jnp.zeros((1, 1), jnp.int32)
    noise = Noise(log_p[:, :1], log_p[:, 0, 0], log_p[:, :1])
    for name in ("rejection", "block"):
        jax.eval_shape(VERIFIERS[name].verify, log_p, log_p[:, :1], ints, ints[0], noise)
    assert len(called) == 2

"""Faults around the sampling law: a cut that is added is ignored nowhere, and an edited draw is noticed."""

from dataclasses import dataclass, fields, replace

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from launch.cli.recipes import load_recipe
from launch.diagnosis.diagnose import diagnostic_run
from specjax.rollout.plan import RolloutConfig
from specjax.sampling import SamplingLaw, full_log_probs, process_logits
from specjax.testing import exact, reference_law
from specjax.train.config import TrainConfig
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

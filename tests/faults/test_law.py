"""Faults around the sampling law: a cut that is added is ignored nowhere, and an edited draw is noticed."""

import json
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array

from configs.override import override
from launch.cli.recipes import load_recipe
from launch.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer
from launch.diagnosis.diagnose import diagnostic_run
from launch.setup.networks import build_networks
from specjax.drafters.distillation import Objective, divergence
from specjax.log_probs import token_log_probs
from specjax.parallel.mesh import MeshConfig, make_mesh
from specjax.rollout.plan import RolloutConfig
from specjax.sampling import SamplingLaw, full_log_probs, process_logits, sample
from specjax.testing import assert_verifier_lossless, exact, reference_law
from specjax.testing.policy import tiny_policy
from specjax.train.config import TrainConfig
from specjax.types import PyTree
from specjax.verify import VERIFIERS, AcceptLaw, Noise, Verdict, accept_law, block_law, draw
from specjax.verify import law as law_module
from specjax.vocabulary import with_tokens
from tests.launch.programs import SMALLEST
from tests.launch.tokenizer_files import write_word_tokenizer
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


@pytest.mark.parametrize(
    "law", [SamplingLaw(), SamplingLaw(0.0), SamplingLaw(0.7, top_k=4), SamplingLaw(0.7, top_p=0.9)], ids=str
)
def test_row_103_ids_without_a_token_have_no_probability(law: SamplingLaw) -> None:
    plain, params = tiny_policy()
    policy, tokens, start = with_tokens(plain, {0, 1, 3}), jnp.array([[0, 1, 3, 1]]), jnp.zeros(1, jnp.int32)
    others = np.array([2, 4])

    @jax.jit
    def run(params: PyTree) -> tuple[list[Array], list[Array]]:
        """Return the law, computed in both ways, and each objective of a draft that has all ids."""
        output = policy.apply(params, tokens, start)
        laws = [process_logits(x, law) for x in (output.logits, policy.unembed(params, output.hidden))]
        full, drafted = (full_log_probs(x, law) for x in (output.logits, plain.apply(params, tokens, start).logits))
        return laws, [divergence(objective, full, drafted) for objective in get_args(Objective)]

    @jax.jit
    def verified(log_p: Array) -> tuple[Array, list[tuple[Array, Array]]]:
        """Return samples, and the survival and residual where the draft proposes ids without a token."""
        log_q = jnp.log(jnp.array([[[0.1, 0.1, 0.6, 0.1, 0.1]], [[0.0, 0.0, 1.0, 0.0, 0.0]], [[0.2] * 5]]))
        rows, draft = jnp.repeat(log_p[:, :2], 3, axis=0), jnp.array([[2], [2], [4]])
        found = [law_of(rows, log_q, draft, jnp.ones(3, jnp.int32)) for law_of in (accept_law, block_law)]
        noise = jax.random.gumbel(jax.random.key(0), (2000, *log_p.shape))
        return sample(log_p[None], noise), [(x.survival, x.residual(jnp.zeros(3, jnp.int32))) for x in found]

    laws, objectives = run(params)
    for log_p in laws:
        p = np.exp(log_p)
        assert not p[..., others].any() and np.allclose(p.sum(-1), 1)
        drawn, verdicts = verified(log_p)
        assert {*np.unique(drawn)} <= {0, 1, 3}
        for survival, residual in verdicts:
            assert not np.asarray(survival).any() and not np.exp(residual)[:, others].any()
    assert all(np.isfinite(x).all() for x in objectives)

    def loss(params: PyTree) -> Array:
        log_probs, entropy = token_log_probs(params, policy.apply(params, tokens, start), tokens, law)
        return jnp.sum(log_probs) + jnp.sum(entropy)

    value, gradient = jax.device_get(jax.jit(jax.value_and_grad(loss))(params))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((value, gradient)))
    assert not gradient["head"][:, others].any() and gradient["head"][:, 0].any()


def test_row_103_a_policy_has_the_tokens_of_its_tokenizer(tmp_path: Path) -> None:
    directory = write_word_tokenizer(tmp_path)
    contents = json.loads((directory / "tokenizer.json").read_text())
    contents["model"]["vocab"]["<tool>"] = 13  # after a gap
    (directory / "tokenizer.json").write_text(json.dumps(contents))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 14]}))
    tokenizer, mesh = HuggingFaceTokenizer(directory), make_mesh(MeshConfig())
    config = override(SMALLEST, {"model.architecture.vocab_size": 16, "draft.kind": "none", "rollout.draft_length": 0})
    for of, ids in ((tokenizer, {*range(10), 13, 14}), (ByteTokenizer(), None)):
        if ids is None:
            config = override(config, {"model.architecture.vocab_size": 257})
        policy, params = (networks := build_networks(config, mesh, of, [])).policy, networks.params.policy
        logits = policy.unembed(params, jnp.ones((1, 1, 8)))[0, 0]
        assert {*np.flatnonzero(logits > -100)} == (ids or {*range(257)})

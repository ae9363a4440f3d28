"""Draft heads in published layouts agree with the numpy references, within 1e-4."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.config import DecoderConfig
from models.decoder import make_policy
from models.drafts.eagle3 import make_eagle3
from models.drafts.mtp import make_mtp
from models.hf.config import read_hf_config
from models.hf.drafts.mtp import load_mtp
from models.hf.drafts.reader import load_public_draft
from models.hf.drafts.tensors import draft_tensors
from models.hf.layout import Stored
from models.hf.load import load_policy
from models.hf.mtp_layout import mtp_tensors
from models.params import by_path
from specjax.cache import decode_view, resize
from specjax.drafters import HeadDrafter, Proposal
from specjax.drafters.base import Anchors
from specjax.drafters.head import HeadState
from specjax.sampling import SamplingLaw
from specjax.types import Params, Policy, PolicyOutput, Prompts
from tests.models import eagle3_reference, mtp_reference
from tests.models.eagle3_checkpoints import INNER, ONE, VOCAB, WIDTH, Public
from tests.models.eagle3_reference import Step, Weights, draft_logits, full_pass, to_full_vocabulary
from tests.models.mtp_reference import FAMILIES

K = 3
LAW = SamplingLaw(temperature=0.8)
SPECULATORS = Public(dialect="speculators")
NORM_31 = ("norm_before_fc", "norm_before_residual", "norm_output")
# Each option alone, and combinations that are published.
ONE_BY_ONE = {
    "norm_before_fc": replace(SPECULATORS, flags=("norm_before_fc",)),
    "fc_norm": Public(flags=("fc_norm",)),
    "norm_before_residual": replace(SPECULATORS, flags=("norm_before_residual",)),
    "norm_output": Public(flags=("norm_output",)),
    "q and k norm": replace(SPECULATORS, qk_norm=True),
    "two layers": replace(SPECULATORS, num_layers=2),
    "sliding window": replace(SPECULATORS, window=3),
    "two feature layers": Public(layers=(1, 5)),
}
TOGETHER = {
    "classic": Public(),
    "3.1, full vocabulary": Public(flags=("fc_norm", "norm_output"), ids=None),
    "last hidden": Public(use_aux_hidden_state=False),
    "speculators": replace(SPECULATORS, flags=NORM_31, qk_norm=True, num_layers=2, window=4),
}


@dataclass(frozen=True)
class Head:
    """A head that was written in a public layout and loaded.

    weights: its tensors in float64; for an MTP head, together with the policy's.
    stored:  place of each stored tensor of the head in its parameters.
    table:   the policy's embedding.
    ids:     the draft vocabulary.
    width:   size of the features that it reads at each position.
    step:    the reference's step, given weights.
    fuse:    the reference's function from features [T, F] to the first hidden states, given weights.
    """

    policy: Policy
    drafter: HeadDrafter
    params: Params
    weights: Weights
    stored: dict[str, Stored]
    table: np.ndarray
    ids: np.ndarray
    width: int
    reads_features: bool
    step: Callable[[Weights], Step]
    fuse: Callable[[Weights, np.ndarray], np.ndarray] = lambda weights, features: features

    def draft_logits(
        self, features: np.ndarray, tokens: list[int], drafted: np.ndarray, weights: Weights | None = None
    ) -> np.ndarray:
        weights = self.weights if weights is None else weights
        return draft_logits(self.step(weights), self.fuse(weights, features), self.table, tokens, drafted)

    def log_q(self, logits: np.ndarray) -> np.ndarray:
        full = to_full_vocabulary(logits, self.ids - np.arange(len(self.ids)), VOCAB) / LAW.temperature
        return full - np.log(np.exp(full).sum(axis=-1, keepdims=True))

    def output(self, features: np.ndarray, logits: np.ndarray) -> PolicyOutput:
        """Return a policy output with the features that the head reads; all other fields are unusable."""
        seen, junk = jnp.asarray(features), jnp.full((*features.shape[:2], WIDTH), jnp.nan)
        both = (seen, junk) if self.reads_features else (junk, seen)
        return PolicyOutput(jnp.asarray(logits), *both, None)


def load_public(public: Public, directory: Path) -> Head:
    weights = public.write(directory)
    config, params, ids, layers = load_public_draft(directory, ONE)
    assert layers == (public.layers if public.use_aux_hidden_state else ())
    shape = dict(hidden_size=WIDTH, intermediate_size=INNER, num_heads=2, num_kv_heads=2, head_dim=6, num_layers=7)
    policy = make_policy(DecoderConfig(**shape, vocab_size=VOCAB, feature_layers=public.layers))
    table = np.random.default_rng(1).normal(size=(VOCAB, WIDTH)).astype(np.float32)

    def fuse(weights: Weights, features: np.ndarray) -> np.ndarray:
        return np.stack([eagle3_reference.fuse(weights, public.shape, row) for row in features])

    return Head(
        policy=policy,
        drafter=make_eagle3(config, policy, ids),
        params=Params({"embed": {"embedding": jnp.asarray(table)}}, params),
        weights=weights,
        stored=draft_tensors(config, public.dialect),
        table=table.astype(np.float64),
        ids=public.target_ids,
        width=config.feature_size,
        reads_features=config.use_aux_hidden_state,
        step=lambda weights: partial(eagle3_reference.step, weights, public.shape),
        fuse=fuse,
    )


def load_convention(convention: str, directory: Path) -> Head:
    tensors = mtp_reference.write_checkpoint(directory, convention)
    decoder = read_hf_config(directory, ())
    found = load_mtp(directory, decoder, ONE)
    assert found is not None and found[0].convention.name == convention
    policy, weights = make_policy(decoder), {name: x.astype(np.float64) for name, x in tensors.items()}
    return Head(
        policy=policy,
        drafter=make_mtp(found[0], policy),
        params=Params(load_policy(directory, decoder, ONE), found[1]),
        weights=weights,
        stored=mtp_tensors(found[0], decoder.num_layers),
        table=weights["model.embed_tokens.weight"],
        ids=np.arange(VOCAB),
        width=WIDTH,
        reads_features=False,
        step=lambda weights: partial(mtp_reference.step, FAMILIES[convention], weights),
    )


def load(name: str, directory: Path) -> Head:
    if name in FAMILIES:
        return load_convention(name, directory / name)
    return load_public((ONE_BY_ONE | TOGETHER)[name], directory)


@pytest.fixture(scope="module", params=[*TOGETHER, *FAMILIES])
def head(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Head:
    return load(request.param, tmp_path_factory.mktemp("head"))


@pytest.mark.parametrize("name", [*ONE_BY_ONE, *FAMILIES])
def test_full_pass(tmp_path: Path, name: str):
    head, rows, length = load(name, tmp_path), 2, 7
    generator = np.random.default_rng(1)
    features = generator.normal(size=(rows, length, head.width)).astype(np.float32)
    tokens = generator.integers(VOCAB, size=(rows, length), dtype=np.int32)
    network = head.drafter.head

    @jax.jit
    def run(params: Params, features: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        view = decode_view(jnp.zeros(rows, jnp.int32), length, length, window=network.window)
        cache = network.init_cache(rows, length)
        normed, fed_back, _ = network.step(params, network.fuse(params, features), tokens, cache, view, None)
        return network.unembed(params, normed), fed_back

    logits, hidden = run(head.params, features, tokens)
    for row in range(rows):
        read = head.fuse(head.weights, features[row])
        expected = full_pass(head.step(head.weights), read, head.table[tokens[row]])
        np.testing.assert_allclose(logits[row], expected[0], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(hidden[row], expected[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("head", FAMILIES, indirect=True)
def test_an_mtp_head_reads_what_the_policys_head_reads(head: Head):
    """It reads the hidden state after the final norm, from which `unembed` computes logits, tied or not."""

    @jax.jit
    def run(params: Params, tokens: jax.Array) -> tuple[PolicyOutput, jax.Array]:
        output = head.policy.apply(params.policy, tokens, jnp.zeros(2, jnp.int32))
        return output, head.policy.unembed(params.policy, head.drafter.features(output))

    tokens = np.random.default_rng(3).integers(VOCAB, size=(2, 5), dtype=np.int32)
    output, logits = run(head.params, tokens)
    assert output.features.shape == (2, 5, 0)
    np.testing.assert_array_equal(logits, output.logits)
    name = "lm_head.weight" if "lm_head.weight" in head.weights else "model.embed_tokens.weight"
    np.testing.assert_allclose(logits, output.hidden @ head.weights[name].T, rtol=1e-4, atol=1e-4)


def test_decode_rounds_repair_the_cache(head: Head):
    """Each round drafts as after a fresh prefill of the committed tokens with their true features, at ragged lengths.

    accepted[round][row] drafted tokens are kept; None finishes the row. Later outputs of a verification are arbitrary.
    """
    prompts = [[3], [5, 0, 16, 2], [7, 7], [1, 12, 4, 9, 10]]
    accepted = [[0, 1, 2, 3], [3, 0, 3, 1], [2, None, 0, 3], [1, None, 3, 0]]
    rows, longest, budget = len(prompts), 5, 18
    generator = np.random.default_rng(2)
    features = generator.normal(size=(rows, longest + budget, head.width)).astype(np.float32)
    padded = np.array([[*prompt, *[11] * (longest - len(prompt))] for prompt in prompts])
    lengths = np.array([len(prompt) for prompt in prompts])
    drafter = head.drafter

    @jax.jit
    def start(params: Params, prompts: Prompts, features: jax.Array) -> HeadState:
        return resize(drafter.start(params, prompts, features, K + 1), budget)

    @jax.jit
    def propose(params: Params, state: HeadState, gumbel: jax.Array) -> tuple[Proposal, HeadState]:
        return drafter.propose(params, state, gumbel, LAW)

    observe = jax.jit(drafter.observe)
    committed = [[*prompt, int(generator.integers(VOCAB))] for prompt in prompts]
    state = start(
        head.params, Prompts(jnp.asarray(padded), jnp.asarray(lengths), jnp.arange(rows)), features[:, :longest]
    )
    state = observe(
        state,
        jnp.asarray(features[np.arange(rows), lengths - 1][:, None]),
        jnp.asarray([[row[-1]] for row in committed]),
        jnp.ones(rows, jnp.int32),
    )
    for kept in accepted:
        gumbel = generator.gumbel(size=(rows, K, VOCAB)).astype(np.float32)
        proposal, state = propose(head.params, state, gumbel)
        drafts = np.asarray(proposal.tokens)
        # A row without tokens of the last round drafts from the same state again.
        np.testing.assert_array_equal(proposal.length, K)
        np.testing.assert_array_equal(drafts, np.argmax(proposal.log_q + gumbel, axis=-1))
        seen = generator.normal(size=(rows, K + 1, head.width)).astype(np.float32)
        emitted = generator.integers(VOCAB, size=(rows, K + 1))
        counts = np.array([0 if m is None else m + 1 for m in kept])
        for row, m in enumerate(kept):
            if m is None:
                continue
            known = len(committed[row]) - 1
            logits = head.draft_logits(features[row, :known], committed[row], drafts[row, :-1])
            np.testing.assert_allclose(proposal.log_q[row], head.log_q(logits), rtol=1e-4, atol=1e-4)
            seen[row, : m + 1] = features[row, known : known + m + 1]
            emitted[row, :m] = drafts[row, :m]
            committed[row] += emitted[row, : m + 1].tolist()
        state = observe(state, jnp.asarray(seen), jnp.asarray(emitted, jnp.int32), jnp.asarray(counts))
    assert len({len(row) for row in committed}) == rows


@pytest.mark.parametrize("head", ["classic", "speculators"], indirect=True)
def test_rows_that_restart_use_only_later_tokens(head: Head):
    """Rows that did not observe some tokens drop all earlier ones. A row that observed all keeps them."""
    missed, counts = np.array([0, 1, 4]), np.array([2, 1, 3])
    rows, longest, budget = len(missed), 4, 14
    generator, drafter = np.random.default_rng(4), head.drafter
    features = generator.normal(size=(rows, longest + budget, head.width)).astype(np.float32)
    tokens = generator.integers(VOCAB, size=(rows, longest + budget))
    visible = longest + missed

    @jax.jit
    def proposal_behind_the_gap(params: Params, gumbel: jax.Array) -> tuple[Proposal, Proposal]:
        def observed(state: HeadState, at: np.ndarray, width: int, count: np.ndarray) -> HeadState:
            index = at[:, None] + np.arange(width)
            seen, following = (
                np.take_along_axis(x, i, axis=1) for x, i in ((features, index[..., None]), (tokens, index + 1))
            )
            return drafter.observe(state, jnp.asarray(seen), jnp.asarray(following, jnp.int32), jnp.asarray(count))

        lengths = jnp.full(rows, longest, jnp.int32)
        prompts = Prompts(jnp.asarray(tokens[:, :longest], jnp.int32), lengths, lengths)
        state = resize(drafter.start(params, prompts, jnp.asarray(features[:, :longest]), K + 1), budget)
        state = observed(state, np.full(rows, longest - 1), 1, np.ones(rows, np.int32))
        state = drafter.catch_up(state, jnp.asarray(visible, jnp.int32), jnp.asarray(tokens, jnp.int32), lengths)
        blind, state = drafter.propose(params, state, gumbel, LAW)
        state = observed(state, visible, K + 1, counts.astype(np.int32))
        return blind, drafter.propose(params, state, gumbel, LAW)[0]

    blind, proposal = proposal_behind_the_gap(head.params, jnp.zeros((rows, K, VOCAB)))
    np.testing.assert_array_equal(blind.length, np.where(missed, 0, K))
    np.testing.assert_array_equal(proposal.length, K)
    for row, drafts in enumerate(np.asarray(proposal.tokens)):
        first, known = visible[row] if missed[row] else 0, visible[row] + counts[row]
        seen, committed = features[row, first:known], tokens[row, first : known + 1].tolist()
        logits = head.draft_logits(seen, committed, drafts[:-1])
        np.testing.assert_allclose(proposal.log_q[row], head.log_q(logits), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "head, anchored",
    [
        *((name, True) for name in (*TOGETHER, *FAMILIES)),
        *((name, False) for name in ("classic", "speculators", "mimo")),
    ],
    indirect=["head"],
)
def test_loss_and_gradient(head: Head, anchored: bool):
    """The gradient is compared in one random direction over all weights of the head. The policy's gradient is zero."""
    head = replace(head, drafter=replace(head.drafter, unroll=3, decay=0.7))
    rows, length = 2, 8
    generator = np.random.default_rng(3)
    tokens = generator.integers(VOCAB, size=(rows, length)).astype(np.int32)
    features = generator.normal(size=(rows, length, head.width)).astype(np.float32)
    logits = 2 * generator.normal(size=(rows, length, VOCAB)).astype(np.float32)
    mask = np.arange(length) >= np.array([[2], [4]])
    mask[0, -2:] = False
    # Of the draft whose position 1 is that token: one in the prompt does not count.
    anchors, weight = None, mask.astype(float)
    if anchored:
        # The last one of the second row lies after its end, and does not count.
        anchors = Anchors(jnp.array([[2, 4, 5], [4, 7, 9]], jnp.int32), jnp.array([[2.0, 1.0, 3.0], [1.5, 2.5, 0.0]]))
        weight = np.zeros((rows, length + 2))
        np.put_along_axis(weight, np.asarray(anchors.place), np.asarray(anchors.weight), axis=1)

    @jax.jit
    def run(params: Params, tokens: jax.Array, output: PolicyOutput, mask: jax.Array) -> tuple[tuple, Params]:
        def loss(params: Params) -> tuple[jax.Array, jax.Array]:
            return head.drafter.loss(params, tokens, output, mask, LAW, anchors)

        return jax.value_and_grad(loss, has_aux=True)(params)

    (loss, overlap), gradient = run(head.params, tokens, head.output(features, logits), mask)

    def reference(weights: Weights) -> tuple[float, np.ndarray]:
        """Return (loss, overlap per token). From every position, the head drafts along the true tokens."""
        loss, overlap = 0.0, np.zeros(tokens.shape)
        for row, t in np.ndindex(rows, length - 2):
            passes = min(head.drafter.unroll, length - 2 - t)
            along = tokens[row, t + 2 : t + 1 + passes]
            drafted = head.draft_logits(features[row, : t + 1], tokens[row, : t + 2], along, weights)
            for i in range(passes):
                if not mask[row, t + 2 + i]:
                    continue
                scores = drafted[i] / LAW.temperature
                log_q = scores - np.log(np.exp(scores).sum())
                law = np.exp(logits[row, t + 1 + i].astype(np.float64) / LAW.temperature)
                p = (law / law.sum())[head.ids]
                loss -= weight[row, t + 2] * head.drafter.decay**i * (p @ log_q)
                if i == 0 and weight[row, t + 2]:
                    overlap[row, t + 2] = np.minimum(p, np.exp(log_q)).sum()
        return loss, overlap

    expected = reference(head.weights)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-4)
    np.testing.assert_allclose(overlap, expected[1], rtol=1e-4)

    direction = {name: generator.normal(size=head.weights[name].shape) for name in head.stored}

    def loss_at(step: float) -> float:
        return reference(head.weights | {name: head.weights[name] + step * v for name, v in direction.items()})[0]

    flat = by_path(gradient.draft)
    slope = sum(
        float(np.vdot(stored.pack(np.asarray(flat[stored.path])), direction[name]))
        for name, stored in head.stored.items()
    )
    np.testing.assert_allclose(slope, (loss_at(1e-5) - loss_at(-1e-5)) / 2e-5, rtol=1e-3)
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(gradient.policy))

"""MTP heads, read from checkpoints with the public names, against `mtp_reference`, within 1e-4."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.decoder import make_policy
from models.drafts.mtp import make_mtp
from models.hf.config import read_hf_config
from models.hf.load import load_policy
from models.hf.mtp_files import load_mtp
from specjax.cache import decode_view, resize
from specjax.drafters import HeadDrafter, Proposal
from specjax.drafters.head import HeadState
from specjax.parallel.mesh import MeshConfig, make_mesh
from specjax.sampling import SamplingLaw
from specjax.types import Params, Policy, PolicyOutput, Prompts
from tests.models.eagle3_reference import KeysValues, Weights
from tests.models.mtp_reference import STEPS, VOCAB, WIDTH, Step, draft_logits, full_pass, write_checkpoint

K = 3
LAW = SamplingLaw(temperature=0.8)


@dataclass(frozen=True)
class Head:
    policy: Policy
    drafter: HeadDrafter
    params: Params
    weights: Weights
    step: Step

    def log_q(self, logits: np.ndarray) -> np.ndarray:
        scaled = logits / LAW.temperature
        return scaled - np.log(np.exp(scaled).sum(axis=-1, keepdims=True))


@pytest.fixture(scope="module", params=STEPS)
def head(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Head:
    directory = tmp_path_factory.mktemp("mtp") / request.param
    tensors = write_checkpoint(directory, request.param)
    decoder, mesh = read_hf_config(directory, ()), make_mesh(MeshConfig())
    found = load_mtp(directory, decoder, mesh)
    assert found is not None and found[0].convention.name == request.param
    policy = make_policy(decoder)
    params = Params(load_policy(directory, decoder, mesh), found[1])
    weights = {name: x.astype(np.float64) for name, x in tensors.items()}
    return Head(policy, make_mtp(found[0], policy), params, weights, STEPS[request.param])


def test_full_pass(head: Head):
    rows, length = 3, 7
    generator = np.random.default_rng(1)
    hidden = generator.normal(size=(rows, length, WIDTH)).astype(np.float32)
    tokens = generator.integers(VOCAB, size=(rows, length), dtype=np.int32)
    network = head.drafter.head

    @jax.jit
    def run(params: Params, hidden: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        view = decode_view(jnp.zeros(rows, jnp.int32), length, length)
        cache = network.init_cache(rows, length)
        normed, fed_back, _ = network.step(params, network.fuse(params, hidden), tokens, cache, view, None)
        return network.unembed(params, normed), fed_back

    logits, state = run(head.params, hidden, tokens)
    for row in range(rows):
        expected = full_pass(head.step, head.weights, hidden[row], tokens[row], KeysValues())
        np.testing.assert_allclose(logits[row], expected[0], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(state[row], expected[1], rtol=1e-4, atol=1e-4)


def test_reads_what_the_policys_head_reads(head: Head):
    """The hidden state after the final norm, whose logits `unembed` gives, with tied embeddings or without."""

    @jax.jit
    def run(params: Params, tokens: jax.Array) -> tuple[PolicyOutput, jax.Array]:
        output = head.policy.apply(params.policy, tokens, jnp.zeros(2, jnp.int32))
        return output, head.policy.unembed(params.policy, head.drafter.reads(output))

    tokens = np.random.default_rng(3).integers(VOCAB, size=(2, 5), dtype=np.int32)
    output, logits = run(head.params, tokens)
    assert output.features.shape == (2, 5, 0)
    np.testing.assert_array_equal(logits, output.logits)
    name = "lm_head.weight" if "lm_head.weight" in head.weights else "model.embed_tokens.weight"
    np.testing.assert_allclose(logits, output.hidden @ head.weights[name].T, rtol=1e-4, atol=1e-4)


def test_decode_rounds_repair_the_cache(head: Head):
    """Each round drafts as if from scratch over the true hidden states of what is committed, at ragged lengths.

    accepted[round][row] drafts are kept, None finishes the row. What a verification returns beyond them is junk.
    """
    prompts = [[3], [5, 0, 16, 2], [7, 7]]
    accepted = [[0, 1, 3], [3, 0, None], [2, 3, None]]
    rows, longest, budget = len(prompts), 4, 14
    generator = np.random.default_rng(2)
    hidden = generator.normal(size=(rows, longest + budget, WIDTH)).astype(np.float32)
    padded = np.array([[*prompt, *[11] * (longest - len(prompt))] for prompt in prompts], np.int32)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    drafter = head.drafter

    @jax.jit
    def start(params: Params, prompts: Prompts, hidden: jax.Array) -> HeadState:
        return resize(drafter.start(params, prompts, hidden, K + 1), budget)

    @jax.jit
    def propose(params: Params, state: HeadState, gumbel: jax.Array) -> tuple[Proposal, HeadState]:
        return drafter.propose(params, state, gumbel, LAW)

    committed = [[*prompt, int(generator.integers(VOCAB))] for prompt in prompts]
    state = start(
        head.params, Prompts(jnp.asarray(padded), jnp.asarray(lengths), jnp.arange(rows)), hidden[:, :longest]
    )
    state = drafter.observe(
        state,
        jnp.asarray(hidden[np.arange(rows), lengths - 1][:, None]),
        jnp.asarray([[row[-1]] for row in committed]),
        jnp.ones(rows, jnp.int32),
    )
    for kept in accepted:
        gumbel = generator.gumbel(size=(rows, K, VOCAB)).astype(np.float32)
        proposal, state = propose(head.params, state, gumbel)
        drafts = np.asarray(proposal.tokens)
        np.testing.assert_array_equal(drafts, np.argmax(proposal.log_q + gumbel, axis=-1))
        seen = generator.normal(size=(rows, K + 1, WIDTH)).astype(np.float32)
        emitted = generator.integers(VOCAB, size=(rows, K + 1))
        counts = np.array([0 if m is None else m + 1 for m in kept])
        for row, m in enumerate(kept):
            if m is None:
                continue
            known = len(committed[row]) - 1
            logits = draft_logits(head.step, head.weights, hidden[row, :known], committed[row], drafts[row, :-1])
            np.testing.assert_allclose(proposal.log_q[row], head.log_q(logits), rtol=1e-4, atol=1e-4)
            seen[row, : m + 1] = hidden[row, known : known + m + 1]
            emitted[row, :m] = drafts[row, :m]
            committed[row] += emitted[row, : m + 1].tolist()
        state = drafter.observe(state, jnp.asarray(seen), jnp.asarray(emitted, jnp.int32), jnp.asarray(counts))
    assert len({len(row) for row in committed}) == rows


def test_the_loss_is_of_what_drafting_would_propose(head: Head):
    """Index t in pass i: the law of the i-th draft behind true hidden states 0 .. t, where drafts are the true tokens.

    Soft cross-entropy against the policy's law there, where the predicted token is of the completion.
    """
    generator, length, start = np.random.default_rng(4), 8, 3
    hidden = generator.normal(size=(1, length, WIDTH)).astype(np.float32)
    logits = generator.normal(size=(1, length, VOCAB)).astype(np.float32)
    tokens = generator.integers(VOCAB, size=(1, length), dtype=np.int32)
    mask = np.arange(length)[None] >= start
    output = PolicyOutput(jnp.asarray(logits), jnp.zeros((1, length, 0)), jnp.asarray(hidden), None)
    loss, overlap = jax.jit(head.drafter.loss, static_argnums=4)(head.params, tokens, output, mask, LAW)

    p = np.exp(head.log_q(logits[0].astype(np.float64)))
    expected, expected_overlap = 0.0, 0.0
    for t in range(length - 2):
        drafted = tokens[0, t + 2 : t + 1 + head.drafter.unroll]
        log_q = head.log_q(
            draft_logits(head.step, head.weights, hidden[0, : t + 1], tokens[0, : t + 2].tolist(), drafted)
        )
        for i, law in enumerate(log_q):
            predicted = t + 2 + i
            if start <= predicted < length:
                expected -= head.drafter.decay**i * p[predicted - 1] @ law
                expected_overlap += np.minimum(p[predicted - 1], np.exp(law)).sum() if i == 0 else 0.0
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
    np.testing.assert_allclose(np.sum(overlap), expected_overlap, rtol=1e-4)

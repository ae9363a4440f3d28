"""Block drafts agree with the numpy reference, within 1e-4."""

from dataclasses import dataclass, replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.config import DecoderConfig
from models.decoder import init_decoder, make_policy
from models.drafts.block import BlockConfig, block_like, init_block, make_block
from models.hf.drafts.tensors import draft_tensors
from models.params import by_path
from specjax.cache import resize
from specjax.drafters import BlockDrafter, Proposal
from specjax.drafters.base import Anchors
from specjax.drafters.head import HeadState
from specjax.sampling import SamplingLaw
from specjax.testing.hlo import Program
from specjax.types import Params, PolicyOutput, Prompts, PyTree
from tests.models.block_reference import BlockShape, block_logits
from tests.models.eagle3_reference import Weights

K, VOCAB, WIDTH = 3, 17, 12
LAW = SamplingLaw(temperature=0.8)
DECODER = DecoderConfig(
    hidden_size=WIDTH,
    intermediate_size=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    num_layers=3,
    rope_theta=50.0,
    norm_eps=1e-3,
    vocab_size=VOCAB,
    feature_layers=(1, 2),
)
POLICY = make_policy(DECODER)
WEIGHTS = jax.jit(lambda: nn.unbox(init_decoder(DECODER, jax.random.key(1))))()
# Windows are smaller than a block, so that they cut the slots as well as the context.
DRAFTS = {
    "dflash": dict(sample_from_anchor=False, mask_token_id=16),
    "dspark": dict(markov_rank=5, enable_confidence_head=True, confidence_head_with_markov=True),
    "mixed windows, reduced": dict(
        num_layers=3, sliding_window=2, sliding_layers=(0, 2), markov_rank=2, mask_token_id=4, draft_vocab_size=9
    ),
    "windows, not causal, reduced": dict(
        sliding_window=3,
        sliding_causal=False,
        sample_from_anchor=False,
        draft_vocab_size=11,
        enable_confidence_head=True,
    ),
}


@dataclass(frozen=True)
class Draft:
    """A block draft with random parameters, and the same in float64 by their public names."""

    config: BlockConfig
    drafter: BlockDrafter
    params: Params

    @property
    def ids(self) -> np.ndarray:
        """The policy's ids of the draft's vocabulary."""
        return np.arange(VOCAB) if self.drafter.target_ids is None else self.drafter.target_ids

    @property
    def weights(self) -> Weights:
        return self.in_public_names(self.params.draft)

    def in_public_names(self, tree: PyTree) -> Weights:
        flat, tensors = by_path(tree), draft_tensors(self.config, "speculators")
        return {name: stored.pack(np.asarray(flat[stored.path], np.float64)) for name, stored in tensors.items()}

    def logits(
        self, weights: Weights, mask: np.ndarray, features: np.ndarray, first: int, anchor: int, previous: list[int]
    ) -> tuple[np.ndarray, np.ndarray | None]:
        c = self.config
        shape = BlockShape(
            heads=c.num_heads,
            kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            rope_theta=c.rope_theta,
            eps=c.norm_eps,
            from_anchor=c.sample_from_anchor,
            windows=c.windows,
            causal=c.sliding_causal,
        )
        table = np.asarray(WEIGHTS["embed"]["embedding"], np.float64)
        head = np.asarray(WEIGHTS["head"]["kernel"], np.float64).T
        return block_logits(weights, shape, table, head, mask, features.astype(float), first, anchor, previous)

    @property
    def mask(self) -> np.ndarray:
        row = self.config.mask_token_id
        return np.asarray(self.params.draft["mask"] if row is None else WEIGHTS["embed"]["embedding"][row], np.float64)

    def log_q(self, features: np.ndarray, first: int, anchor: int, previous: list[int]) -> np.ndarray:
        logits, _ = self.logits(self.weights, self.mask, features, first, anchor, previous)
        logits /= LAW.temperature
        log_q = np.full((len(previous), VOCAB), -np.inf)
        log_q[:, self.ids] = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        return log_q


def random_draft(name: str) -> Draft:
    config = block_like(DECODER, K, **{"num_layers": 2} | DRAFTS[name])
    config.check(DECODER)
    tree = jax.jit(lambda: nn.unbox(init_block(config, jax.random.key(2))))()
    reduced = config.draft_vocab_size < VOCAB
    ids = np.sort(np.random.default_rng(4).permutation(VOCAB)[: config.draft_vocab_size]) if reduced else None
    # Larger than at the start, so that all parts matter.
    return Draft(config, make_block(config, POLICY, ids), Params(WEIGHTS, jax.tree.map(lambda x: 2 * x, tree)))


@pytest.fixture(scope="module", params=DRAFTS)
def draft(request: pytest.FixtureRequest) -> Draft:
    return random_draft(request.param)


def test_rounds_draft_from_true_features_alone(draft: Draft):
    """Each round drafts as after a fresh start from the committed tokens, at ragged lengths and after a gap.

    accepted[round][row] drafted tokens are kept; None finishes the row. Other outputs of a verification are arbitrary.
    In the third round the last row has missed its features, and begins again.
    """
    prompts = [[3], [5, 0, 16, 2], [7, 7], [1, 12, 4, 9, 10]]
    accepted = [[0, 1, 2, 3], [3, 0, 3, 1], [2, None, 0, 3], [1, None, 3, 0]]
    rows, longest, budget = len(prompts), 5, 22
    generator, drafter = np.random.default_rng(2), draft.drafter
    features = generator.normal(size=(rows, longest + budget, draft.config.feature_size)).astype(np.float32)
    padded = np.array([[*prompt, *[11] * (longest - len(prompt))] for prompt in prompts])
    lengths = np.array([len(prompt) for prompt in prompts])

    @jax.jit
    def start(params: Params, prompts: Prompts, features: jax.Array) -> HeadState:
        return resize(drafter.start(params, prompts, features, K + 1), budget)

    @jax.jit
    def propose(params: Params, state: HeadState, gumbel: jax.Array) -> tuple[Proposal, HeadState]:
        return drafter.propose(params, state, gumbel, LAW)

    observe = jax.jit(drafter.observe)
    committed = [[*prompt, int(generator.integers(VOCAB))] for prompt in prompts]
    given = Prompts(jnp.asarray(padded), jnp.asarray(lengths), jnp.arange(rows))
    state = start(draft.params, given, features[:, :longest])
    last = jnp.asarray(features[np.arange(rows), lengths - 1][:, None])
    state = observe(state, last, jnp.asarray([[row[-1]] for row in committed]), jnp.ones(rows, jnp.int32))
    live, firsts = np.full(rows, True), np.zeros(rows, int)
    for number, kept in enumerate(accepted):
        if number == 2:
            # Two tokens were committed at draft length 0.
            committed[3] += [5, 6]
            firsts[3] = len(committed[3]) - 1
            visible = jnp.asarray([len(row) - 1 for row in committed], jnp.int32)
            state = drafter.catch_up(state, visible, jnp.zeros((rows, 1), jnp.int32), jnp.zeros(rows, jnp.int32))
            blind, state = propose(draft.params, state, jnp.zeros((rows, K, VOCAB)))
            np.testing.assert_array_equal(blind.length, [K, K, K, 0])
            # That round keeps no draft.
            seen = np.stack(
                [np.roll(row, 1 - len(c), axis=0)[: K + 1] for row, c in zip(features, committed, strict=True)]
            )
            emitted = generator.integers(VOCAB, size=(rows, K + 1))
            for row in np.flatnonzero(live):
                committed[row].append(int(emitted[row, 0]))
            state = observe(state, jnp.asarray(seen), jnp.asarray(emitted, jnp.int32), jnp.asarray(live, jnp.int32))
        gumbel = generator.gumbel(size=(rows, K, VOCAB)).astype(np.float32)
        proposal, state = propose(draft.params, state, gumbel)
        drafts = np.asarray(proposal.tokens)
        # A row without tokens of the last round drafts from the same state again.
        np.testing.assert_array_equal(proposal.length, K)
        np.testing.assert_array_equal(proposal.predicted, firsts == 0)
        np.testing.assert_array_equal(drafts, np.argmax(proposal.log_q + gumbel, axis=-1))
        seen = generator.normal(size=(rows, K + 1, draft.config.feature_size)).astype(np.float32)
        emitted = generator.integers(VOCAB, size=(rows, K + 1))
        counts = np.array([0 if m is None else m + 1 for m in kept])
        for row, m in enumerate(kept):
            if m is None:
                continue
            first, known = firsts[row], len(committed[row]) - 1
            previous = [committed[row][-1], *drafts[row, :-1].tolist()]
            expected = draft.log_q(features[row, first:known], first, previous[0], previous)
            np.testing.assert_allclose(proposal.log_q[row], expected, rtol=1e-4, atol=1e-4)
            seen[row, : m + 1] = features[row, known : known + m + 1]
            emitted[row, :m] = drafts[row, :m]
            committed[row] += emitted[row, : m + 1].tolist()
        live = counts > 0
        state = observe(state, jnp.asarray(seen), jnp.asarray(emitted, jnp.int32), jnp.asarray(counts))


@pytest.mark.parametrize("name, further", [("dflash", 0), ("dspark", 1)])
def test_a_round_has_one_pass_for_any_number_of_tokens(name: str, further: int, monkeypatch: pytest.MonkeyPatch):
    """The longest chain of products in its program does not grow with the draft length, nor does their number.

    A Markov head adds one for each token.
    """
    # The kernels of CPUs multiply few queries one at a time.
    monkeypatch.setenv("SPECJAX_KERNELS", "plain")
    draft = random_draft(name)
    prompts = Prompts(jnp.ones((2, 3), jnp.int32), jnp.full(2, 3, jnp.int32), jnp.arange(2))
    features = jnp.zeros((2, 3, draft.config.feature_size))
    state = jax.eval_shape(lambda: draft.drafter.start(draft.params, prompts, features, K + 1))

    def products(k: int) -> tuple[int, int]:
        run = jax.jit(lambda params, state, gumbel: draft.drafter.propose(params, state, gumbel, LAW))
        program = Program(run.lower(draft.params, state, jnp.zeros((2, k, VOCAB))).compile().as_text())

        def longest(computation: str) -> int:
            chains = dict[str, int]()
            for line in program.computations[computation]:
                before = max((chains[name] for name in line.references if name in chains), default=0)
                called = [longest(name) for name in line.references if name in program.computations]
                assert line.opcode != "while" or not any(called), "a loop would hide a chain"
                chains[line.name] = before + max(called, default=0) + (line.opcode == "dot")
            return max(chains.values(), default=0)

        lines = [line for lines in program.computations.values() for line in lines]
        return sum(line.opcode == "dot" for line in lines), max(map(longest, program.computations))

    one, three = products(1), products(3)
    assert three == (one[0] + 2 * further, one[1] + 2 * further) and 10 < one[1] < one[0]


def test_a_confidence_head_changes_no_draft():
    draft = random_draft("dspark")
    bare = make_block(replace(draft.config, enable_confidence_head=False, confidence_head_with_markov=False), POLICY)
    prompts = Prompts(jnp.ones((2, 3), jnp.int32), jnp.full(2, 3, jnp.int32), jnp.arange(2))
    features = jax.random.normal(jax.random.key(3), (2, 3, draft.config.feature_size))
    gumbel = jax.random.gumbel(jax.random.key(4), (2, K, VOCAB))

    def proposal(drafter: BlockDrafter, params: Params) -> Proposal:
        state = drafter.start(params, prompts, features, K + 1)
        state = drafter.observe(state, features[:, -1:], jnp.array([[4], [9]], jnp.int32), jnp.ones(2, jnp.int32))
        return drafter.propose(params, state, gumbel, LAW)[0]

    without = replace(draft.params, draft={name: x for name, x in draft.params.draft.items() if name != "confidence"})
    one, other = (
        jax.jit(proposal, static_argnums=0)(*case) for case in ((draft.drafter, draft.params), (bare, without))
    )
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("anchored", [True, False])
def test_loss_and_gradient(draft: Draft, anchored: bool, monkeypatch: pytest.MonkeyPatch):
    """The gradient is compared in one random direction over all parameters. The policy's gradient is zero."""
    # Two blocks at a time.
    monkeypatch.setattr("specjax.drafters.block.LOSS_SLOTS", 2 * draft.drafter.head.slots)
    drafter = replace(draft.drafter, decay=0.7)
    rows, length = 2, 8
    generator = np.random.default_rng(3)
    tokens = generator.integers(VOCAB, size=(rows, length)).astype(np.int32)
    features = generator.normal(size=(rows, length, draft.config.feature_size)).astype(np.float32)
    logits = 2 * generator.normal(size=(rows, length, VOCAB)).astype(np.float32)
    mask = np.arange(length) >= np.array([[2], [4]])
    mask[0, -2:] = False
    anchors, weight = None, np.where(np.arange(length) >= 2, mask, 0.0)
    if anchored:
        # The last one of the second row lies after its end, and does not count.
        anchors = Anchors(jnp.array([[2, 4, 5], [4, 7, 9]], jnp.int32), jnp.array([[2.0, 1.0, 3.0], [1.5, 2.5, 0.0]]))
        weight = np.zeros((rows, length + 2))
        np.put_along_axis(weight, np.asarray(anchors.place), np.asarray(anchors.weight), axis=1)
    junk = jnp.full((rows, length, WIDTH), jnp.nan)
    output = PolicyOutput(jnp.asarray(logits), jnp.asarray(features), junk, None)

    @jax.jit
    def run(params: Params, tokens: jax.Array, output: PolicyOutput, mask: jax.Array) -> tuple[tuple, Params]:
        def loss(params: Params) -> tuple[jax.Array, jax.Array]:
            return drafter.loss(params, tokens, output, mask, LAW, anchors)

        return jax.value_and_grad(loss, has_aux=True)(params)

    (loss, overlap), gradient = run(draft.params, tokens, output, mask)
    log_p = logits / LAW.temperature
    p = np.exp(log_p) / np.exp(log_p).sum(axis=-1, keepdims=True)
    decays, accepted = 0.7 ** np.arange(K) / sum(0.7 ** np.arange(K)), dict[tuple[int, int, int], float]()

    def reference(weights: Weights, mask_row: np.ndarray) -> tuple[float, np.ndarray]:
        total, expected = 0.0, np.zeros(tokens.shape)
        for row, place in np.argwhere(weight[:, :length] > 0):
            previous = [int(tokens[row, min(place - 1 + k, length - 1)]) for k in range(K)]
            raw, confidence = draft.logits(weights, mask_row, features[row, : place - 1], 0, previous[0], previous)
            raw /= LAW.temperature
            log_q = raw - np.log(np.exp(raw).sum(axis=-1, keepdims=True))
            for k in range(K):
                if place + k >= length or not mask[row, place + k]:
                    break
                law = p[row, place + k - 1, draft.ids]
                total -= weight[row, place] * decays[k] * float(law @ log_q[k])
                # What the confidence head learns does not change with the parameters.
                overlap = accepted.setdefault((row, place, k), float(np.minimum(law, np.exp(log_q[k])).sum()))
                if confidence is not None:
                    lost = np.log1p(np.exp(confidence[k])) - overlap * confidence[k]
                    total += weight[row, place] * decays[k] * float(lost)
                if k == 0:
                    expected[row, place] = overlap
        return total, expected

    value, overlaps = reference(draft.weights, draft.mask)
    np.testing.assert_allclose(loss, value, rtol=1e-5)
    np.testing.assert_allclose(overlap, overlaps, atol=1e-5)
    direction = jax.tree.map(lambda x: generator.normal(size=x.shape), draft.params.draft)
    along, step = draft.in_public_names(direction), 1e-5
    own = direction["mask"] if draft.config.mask_token_id is None else 0.0
    ends = [
        reference({name: x + s * along[name] for name, x in draft.weights.items()}, draft.mask + s * own)[0]
        for s in (step, -step)
    ]
    slope = sum(float(np.sum(a * b)) for a, b in zip(*map(jax.tree.leaves, (gradient.draft, direction)), strict=True))
    np.testing.assert_allclose(slope, (ends[0] - ends[1]) / (2 * step), rtol=1e-3)
    assert not any(np.any(x) for x in jax.tree.leaves(gradient.policy))


def test_memory_of_the_loss_grows_with_the_length_of_rows():
    """Four times the length takes about four times the memory where the draft learns at every token."""
    draft, memory = random_draft("dspark"), list[int]()
    for length in (128, 512):

        def loss(params: PyTree, tokens: jax.Array, output: PolicyOutput, mask: jax.Array) -> jax.Array:
            return draft.drafter.loss(replace(draft.params, draft=params), tokens, output, mask, LAW).loss

        floats = [jnp.zeros((1, length, size)) for size in (VOCAB, draft.config.feature_size, WIDTH)]
        args = jnp.zeros((1, length), jnp.int32), PolicyOutput(*floats, None), jnp.ones((1, length), bool)
        compiled = jax.jit(jax.grad(loss)).lower(draft.params.draft, *args).compile()
        memory.append(compiled.memory_analysis().temp_size_in_bytes)
    assert memory[1] < 5 * memory[0], memory

"""Block drafts agree with the library speculators, both ways. Runs only if torch and speculators are installed."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.drafts.block import make_block
from models.hf.drafts.reader import load_public_draft
from models.hf.drafts.stated_policy import StatedPolicy
from models.hf.drafts.writer import save_public_draft
from specjax.parallel.mesh import MeshConfig, make_mesh
from specjax.types import Params
from tests.models.test_block_drafts import POLICY, VOCAB, WEIGHTS, WIDTH

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
speculators = pytest.importorskip("speculators")
pytestmark = pytest.mark.filterwarnings("ignore")

SLOTS, LENGTH, ANCHORS, WINDOW = 4, 12, 8, 32
REDUCED = np.array([0, 2, 3, 7, 11, 12, 16])
# Windows are longer than the context: speculators lets them begin at the anchor, vLLM and we at each slot.
CASES: dict[str, dict[str, Any]] = {
    "dflash": dict(kind="dflash", layers=("full_attention", "sliding_attention")),
    "dflash, reduced": dict(kind="dflash", layers=("sliding_attention",) * 2, non_causal=True, ids=REDUCED),
    "dspark": dict(kind="dspark", layers=("full_attention",) * 2, rank=4, with_markov=True, ids=REDUCED),
    "dspark, fill-in": dict(kind="dspark", layers=("sliding_attention", "full_attention"), rank=3, from_anchor=False),
    "dspark, no Markov head": dict(kind="dspark", layers=("full_attention",)),
}


def their_model(
    kind: str,
    layers: tuple[str, ...],
    ids: np.ndarray | None = None,
    rank: int = 0,
    with_markov: bool = False,
    non_causal: bool = False,
    from_anchor: bool | None = None,
) -> Any:
    """Return a draft of the library with random weights, and the policy's tables where it borrows them."""
    greedy = speculators.proposals.GreedyTokenProposalConfig(speculative_tokens=SLOTS)
    verifier = speculators.VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"])
    layer = transformers.Qwen3Config(
        hidden_size=WIDTH, intermediate_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=6,
        vocab_size=VOCAB, num_hidden_layers=len(layers), max_position_embeddings=64, rms_norm_eps=1e-3,
        rope_theta=50.0, layer_types=list(layers), sliding_window=WINDOW, use_sliding_window=True,
    )  # fmt: skip
    layer._attn_implementation = "eager"
    fields: dict[str, Any] = dict(
        transformer_layer_config=layer, draft_vocab_size=VOCAB if ids is None else len(ids), block_size=SLOTS,
        aux_hidden_state_layer_ids=[1, 2], mask_token_id=5, sliding_window_non_causal=non_causal,
        speculators_config=speculators.SpeculatorsConfig(
            algorithm=kind, proposal_methods=[greedy], default_proposal_method="greedy", verifier=verifier
        ),
    )  # fmt: skip
    if from_anchor is not None:
        fields["sample_from_anchor"] = from_anchor
    if kind == "dspark":
        fields |= dict(markov_rank=rank, confidence_head_with_markov=with_markov)
        model = speculators.DSparkDraftModel(speculators.DSparkSpeculatorConfig(**fields))
    else:
        model = speculators.DFlashDraftModel(speculators.DFlashSpeculatorConfig(**fields))
    if ids is not None:
        flags = np.isin(np.arange(VOCAB), ids)
        model.load_vocab_mappings(torch.from_numpy(flags), torch.from_numpy(ids - np.arange(len(ids))))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    borrow_tables(model, ids is None)
    return model.eval()


def borrow_tables(model: Any, head: bool) -> None:
    """Copy the policy's embedding, and its vocabulary head if the draft has none, as the library does on loading."""
    with torch.no_grad():
        model.embed_tokens.weight.copy_(torch.from_numpy(np.array(WEIGHTS["embed"]["embedding"])))
        if head:
            model.lm_head.weight.copy_(torch.from_numpy(np.array(WEIGHTS["head"]["kernel"]).T))


def their_logits(
    model: Any, kind: str, features: np.ndarray, tokens: np.ndarray, patch: pytest.MonkeyPatch
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the logits [A, slots, Vd] and the confidence head's [A, slots] at each anchor, as its loss gets them."""
    seen: list[Any] = []
    patch.setattr(f"speculators.models.{kind}.core.compute_metrics", lambda *x, **_: seen.append(x) or (None, {}))
    ones = torch.ones(1, LENGTH)
    with torch.no_grad():
        model(
            hidden_states=torch.from_numpy(features),
            input_ids=torch.from_numpy(tokens).long(),
            loss_mask=ones,
            verifier_last_hidden_states=torch.zeros(1, LENGTH, WIDTH),
            document_ids=torch.zeros(1, LENGTH, dtype=torch.long),
            max_anchors=ANCHORS,
        )
    logits, _, confidence, *_ = seen[0]
    scores = confidence.numpy().reshape(ANCHORS, SLOTS) if kind == "dspark" else None
    return logits.numpy().reshape(ANCHORS, SLOTS, -1), scores


@pytest.mark.parametrize("name", CASES)
def test_a_draft_of_the_library_both_ways(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    case, generator = CASES[name], np.random.default_rng(4)
    features = generator.normal(size=(1, LENGTH, 2 * WIDTH)).astype(np.float32)
    tokens = generator.integers(VOCAB, size=(1, LENGTH)).astype(np.int32)
    model, kind = their_model(**case), case["kind"]
    model.save_pretrained(tmp_path / "theirs")
    expected, scores = their_logits(model, kind, features, tokens, monkeypatch)

    assert np.isfinite(expected).all()

    draft = load_public_draft(tmp_path / "theirs", make_mesh(MeshConfig()))
    config, head = draft.config, make_block(draft.config, POLICY, draft.target_ids).head
    np.testing.assert_array_equal(
        np.arange(VOCAB) if draft.target_ids is None else draft.target_ids, case.get("ids", np.arange(VOCAB))
    )
    # The first anchor has no context.
    place = np.arange(1, ANCHORS)[None]

    @jax.jit
    def run(params: Params, features: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        zero, end = jnp.zeros(1, jnp.int32), jnp.full(1, LENGTH, jnp.int32)
        cache = head.write(params, features, head.init_cache(1, LENGTH + ANCHORS * SLOTS), zero)
        states, _ = head.block(params, tokens[:, place[0]], jnp.asarray(place), head.size, cache, zero, end)
        states = states.reshape(1, -1, WIDTH)
        before = tokens[:, (place[0][:, None] + np.arange(head.size)).ravel()]
        logits = head.unembed(params, states)
        if head.follow is not None:
            logits += head.follow(params, before)
        return logits, None if head.confidence is None else head.confidence(params, states, before)

    logits, confidence = run(Params(WEIGHTS, draft.params), features, tokens)
    first = SLOTS - config.block_size
    np.testing.assert_allclose(logits[0].reshape(ANCHORS - 1, config.block_size, -1), expected[1:, first:], atol=1e-4)
    assert (confidence is None) == (scores is None)
    if confidence is not None and scores is not None:
        np.testing.assert_allclose(confidence[0].reshape(ANCHORS - 1, -1), scores[1:, first:], atol=1e-4)

    save_public_draft(tmp_path / "ours", draft, "speculators", StatedPolicy(architectures=["Qwen3ForCausalLM"]))
    again = type(model).from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    borrow_tables(again, "ids" not in case)
    for ours, theirs in zip(their_logits(again, kind, features, tokens, monkeypatch), (expected, scores), strict=True):
        if ours is not None and theirs is not None:
            np.testing.assert_allclose(ours, theirs, atol=1e-6)

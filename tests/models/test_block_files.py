"""Block drafts of every public dialect draft as the numpy reference, from files written by hand."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models.config import block_feature_layers
from models.drafts.block import BlockConfig, block_like, make_block
from models.hf.drafts.carried import check_copies, copies, policy_tables
from models.hf.drafts.dialects import Dialect
from models.hf.drafts.reader import draft_from_public, load_public_draft, read_public_config
from models.hf.drafts.stated_policy import StatedPolicy, stated_policy
from models.hf.drafts.writer import draft_to_public, save_public_draft
from specjax.parallel.mesh import MeshConfig, make_mesh
from specjax.types import Params
from tests.models.block_reference import BlockShape, block_logits
from tests.models.eagle3_reference import Weights
from tests.models.test_block_drafts import DECODER, POLICY, VOCAB, WEIGHTS, WIDTH

ONE = make_mesh(MeshConfig())
HEADS, KV_HEADS, HEAD_DIM, INNER, MASK = 4, 2, 6, 16, 16
LAYER = dict(
    model_type="qwen3", hidden_act="silu", hidden_size=WIDTH, intermediate_size=INNER, num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, attention_bias=False, vocab_size=VOCAB, num_hidden_layers=2,
    max_position_embeddings=64, rms_norm_eps=1e-3, rope_theta=50.0, use_cache=True, max_window_layers=2,
    tie_word_embeddings=False,
)  # fmt: skip


@dataclass(frozen=True)
class Public:
    """A checkpoint.

    drafted: tokens that it drafts. confidence: width that its confidence head reads. layers: on whose entry it reads
    the policy.
    """

    fields: dict[str, Any]
    drafted: int
    from_anchor: bool
    windows: tuple[int | None, ...] = (None, None)
    rank: int = 0
    ids: tuple[int, ...] | None = None
    confidence: int | None = None
    copies: bool = False
    layers: tuple[int, ...] = (1, 2)

    def tensors(self) -> dict[str, np.ndarray]:
        generator = np.random.default_rng(0)
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (WIDTH, len(self.layers) * WIDTH)}
        shapes |= {"hidden_norm.weight": (WIDTH,), "norm.weight": (WIDTH,)}
        for i in range(2):
            inner = {f"{name}_layernorm.weight": (WIDTH,) for name in ("input", "post_attention")}
            inner |= {f"self_attn.{name}_norm.weight": (HEAD_DIM,) for name in "qk"}
            inner |= {f"self_attn.{x}_proj.weight": (n * HEAD_DIM, WIDTH) for x, n in dict(q=4, k=2, v=2).items()}
            inner |= {"self_attn.o_proj.weight": (WIDTH, HEADS * HEAD_DIM), "mlp.down_proj.weight": (WIDTH, INNER)}
            inner |= {f"mlp.{name}_proj.weight": (INNER, WIDTH) for name in ("gate", "up")}
            shapes |= {f"layers.{i}.{name}": shape for name, shape in inner.items()}
        drafted = VOCAB if self.ids is None else len(self.ids)
        if self.rank:
            shapes |= {f"markov_head.markov_w{i}.weight": (n, self.rank) for i, n in ((1, VOCAB), (2, drafted))}
        if self.ids is not None:
            shapes["lm_head.weight"] = (drafted, WIDTH)
        if self.confidence is not None:
            shapes |= {"confidence_head.proj.weight": (1, self.confidence), "confidence_head.proj.bias": (1,)}
        tensors = {name: generator.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
        if self.copies:
            tensors["embed_tokens.weight"] = np.asarray(WEIGHTS["embed"]["embedding"], np.float32)
            tensors.setdefault("lm_head.weight", np.zeros((VOCAB, WIDTH), np.float32))
        if self.ids is not None:
            tensors["d2t"] = np.array(self.ids, np.int64) - np.arange(drafted)
            tensors["t2d"] = np.isin(np.arange(VOCAB), self.ids)
        return tensors

    def write(self, directory: Path, changed: dict[str, Any] | None = None, **others: np.ndarray | None) -> Weights:
        """Write the files, with other fields and tensors, and return the tensors. None: without the tensor."""
        directory.mkdir(exist_ok=True)
        tensors = {name: x for name, x in (self.tensors() | others).items() if x is not None}
        (directory / "config.json").write_text(json.dumps({**self.fields, **(changed or {})}))
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return {name: x.astype(np.float64) for name, x in tensors.items()}


FULL, SLIDING = "full_attention", "sliding_attention"
PUBLIC = {
    "zlab": Public(
        LAYER
        | dict(architectures=["DFlashDraftModel"], block_size=4, num_target_layers=3, layer_types=[FULL, SLIDING])
        | dict(use_sliding_window=True, sliding_window=3)
        | dict(dflash_config=dict(mask_token_id=MASK, target_layer_ids=[0, 1]), dtype="float32"),
        drafted=3,
        from_anchor=False,
        windows=(None, 3),
    ),
    "speculators": Public(
        dict(
            architectures=["DSparkSpeculator"], speculators_model_type="dspark", transformer_layer_config=LAYER,
            block_size=3, aux_hidden_state_layer_ids=[1, 2], mask_token_id=MASK, markov_rank=3, draft_vocab_size=5,
            markov_head_type="vanilla", enable_confidence_head=True, confidence_head_with_markov=True,
            sliding_window_non_causal=False, speculators_version="0.9.0",
        ),
        drafted=3,
        from_anchor=True,
        rank=3,
        ids=(0, 3, 4, 9, 16),
        copies=True,
        confidence=WIDTH + 3,
    ),
    "deepspec": Public(
        LAYER
        | dict(architectures=["Qwen3DSparkModel"], block_size=3, target_layer_ids=[0, 1], mask_token_id=MASK)
        | dict(num_target_layers=3, num_anchors=512, markov_rank=2, markov_head_type="vanilla")
        | dict(enable_confidence_head=True, confidence_head_with_markov=False),
        drafted=3,
        from_anchor=True,
        confidence=WIDTH,
        rank=2,
        copies=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_draft_is_read(tmp_path: Path, name: str):
    public = PUBLIC[name]
    weights = public.write(tmp_path)
    if public.ids is None:
        weights.pop("lm_head.weight", None)
    config, params, ids, layers = load_public_draft(tmp_path, ONE)
    assert (layers, config.block_size) == (public.layers, public.drafted)
    assert ids is None if public.ids is None else tuple(ids) == public.ids
    config.check(DECODER)
    head, generator = make_block(config, POLICY).head, np.random.default_rng(1)
    features = generator.normal(size=(1, 4, 2 * WIDTH)).astype(np.float32)
    previous = [5, 2, 7]

    @jax.jit
    def run(params: Params, features: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        at, end = jnp.zeros(1, jnp.int32), jnp.full(1, 4, jnp.int32)
        cache = head.write(params, features, head.init_cache(1, 8), at)
        states, _ = head.block(params, jnp.array([[previous[0]]]), end[:, None], 3, cache, at, end)
        logits, before = head.unembed(params, states[:, 0])[0], jnp.array(previous)
        if head.follow is not None:
            logits += head.follow(params, before)
        return logits, None if head.confidence is None else head.confidence(params, states[:, 0], before[None])[0]

    table = np.asarray(WEIGHTS["embed"]["embedding"], np.float64)
    own = np.asarray(WEIGHTS["head"]["kernel"], np.float64).T
    shape = BlockShape(HEADS, KV_HEADS, HEAD_DIM, 50.0, 1e-3, public.from_anchor, public.windows)
    expected = block_logits(weights, shape, table, own, table[MASK], features[0].astype(float), 0, 5, previous)
    actual = run(Params(WEIGHTS, params), features)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), actual, expected)
    assert (actual[1] is None) == (public.confidence is None)


@pytest.mark.parametrize(
    "name, dialect",
    [("zlab", "zlab"), ("speculators", "speculators"), ("zlab", "speculators"), ("deepspec", "deepspec")],
)
def test_a_draft_that_is_written_is_read_again_to_the_bit(tmp_path: Path, name: str, dialect: Dialect):
    PUBLIC[name].write(tmp_path / "read")
    draft, tables = load_public_draft(tmp_path / "read", ONE), policy_tables(DECODER, WEIGHTS)
    policy = stated_policy(replace(DECODER, qk_norm=True))
    save_public_draft(tmp_path / "written", draft, dialect, policy, carried=copies(tables, "float32"))
    again = load_public_draft(tmp_path / "written", ONE)
    assert (again.config, again.feature_layers) == (draft.config, draft.feature_layers)
    jax.tree.map(np.testing.assert_array_equal, (again.params, again.target_ids), (draft.params, draft.target_ids))
    check_copies(tmp_path / "written", tables if dialect == "deepspec" else {})
    own = set() if PUBLIC[name].ids is None else {"lm_head.weight"}
    found = {name for name in load_file(tmp_path / "written/model.safetensors") if name in tables}
    assert found == {"deepspec": set(tables), "speculators": own, "zlab": set()}[dialect]


def causal_layers(fields: dict[str, Any], kinds: list[str]) -> list[bool]:
    """Return which layers z-lab and vLLM make causal within the block: a stated value is that of every layer."""
    for value in (fields.get("is_causal"), fields["dflash_config"].get("causal")):
        if value is not None:
            return [value] * len(kinds)
    return [kind == SLIDING for kind in kinds]


@pytest.mark.parametrize(
    "kinds, stated",
    [
        ([FULL, SLIDING], {}),
        ([FULL, SLIDING], {"is_causal": False}),
        ([SLIDING, SLIDING], {"is_causal": True}),
        ([SLIDING, SLIDING], {"causal": False}),
        ([FULL, FULL], {}),
        ([FULL, FULL], {"is_causal": False}),
    ],
)
def test_causality_is_read_and_written_as_engines_read_it(kinds: list[str], stated: dict[str, bool]):
    inner = {"mask_token_id": MASK, "target_layer_ids": [0, 1]}
    inner |= {name: x for name, x in stated.items() if name == "causal"}
    fields = PUBLIC["zlab"].fields | {"layer_types": kinds, "dflash_config": inner}
    fields |= {name: x for name, x in stated.items() if name == "is_causal"}
    config, layers = draft_from_public(fields)
    assert isinstance(config, BlockConfig)
    expected = [window is not None and config.sliding_causal for window in config.windows]
    written = draft_to_public(config, layers, "zlab", StatedPolicy(num_layers=3))
    assert causal_layers(fields, kinds) == causal_layers(written, kinds) == expected
    speculators = draft_to_public(config, layers, "speculators", StatedPolicy())
    assert speculators["sliding_window_non_causal"] != any(expected)
    assert draft_from_public(speculators)[0] == config


def test_a_fresh_draft_reads_the_layers_of_published_ones():
    """z-lab's draft of Qwen3-8B reads the outputs of 1, 9, 17, 25 and 33 of 36 layers, the inputs of the next ones."""
    assert block_feature_layers(36) == (2, 10, 18, 26, 34)


def test_a_copy_of_another_policys_table_is_refused(tmp_path: Path):
    PUBLIC["deepspec"].write(tmp_path)
    tables = policy_tables(DECODER, WEIGHTS)
    check_copies(tmp_path, {"embed_tokens.weight": tables["embed_tokens.weight"]})
    with pytest.raises(ValueError, match="lm_head.weight: differs from the policy's"):
        check_copies(tmp_path, tables)


@pytest.mark.parametrize(
    "dialect, changes, message",
    [
        ("specforge", {}, "specforge has EAGLE-3 heads only"),
        ("zlab", {"mask_token_id": None}, "mask_token_id = None"),
        ("zlab", {"sample_from_anchor": True}, "zlab has DFlash drafts only"),
        ("zlab", {"draft_vocab_size": 5}, "draft_vocab_size = 5: must be 17, the policy's, for zlab"),
        ("deepspec", {}, "sample_from_anchor = False: deepspec has no such drafts"),
        (
            "deepspec",
            {"sample_from_anchor": True, "sliding_window": 3},
            "sliding_window = 3: must be None for deepspec",
        ),
        ("zlab", {"num_target_layers": None}, "num_target_layers = None: zlab states the number"),
        ("deepspec", {"draft_vocab_size": 5}, "draft_vocab_size = 5: must be 17, the policy's, for deepspec"),
    ],
)
def test_a_draft_that_a_dialect_cannot_hold_is_refused(dialect: Dialect, changes: dict[str, Any], message: str):
    policy = StatedPolicy(num_layers=changes.get("num_target_layers", 3))
    changes = {name: value for name, value in changes.items() if name != "num_target_layers"}
    config = block_like(DECODER, 3, **{"mask_token_id": MASK, "sample_from_anchor": False} | changes)
    with pytest.raises(ValueError, match=message):
        draft_to_public(config, (1, 2), dialect, policy)


@pytest.mark.parametrize(
    "name, changed, message",
    [
        ("zlab", {"dflash_config": {"target_layer_ids": [0, 1]}}, "mask_token_id = null: must be a token id"),
        ("zlab", {"dflash_config": {"mask_token_id": 3}}, "target_layer_ids: missing"),
        (
            "zlab",
            {"dflash_config": {"mask_token_id": 99, "target_layer_ids": [0]}},
            "mask_token_id = 99:",
        ),
        ("zlab", {"dflash_config": {"final_logit_softcapping": 30.0}}, "dflash_config.final_logit_softcapping = 30.0"),
        (
            "zlab",
            {"architectures": ["DFlash2DraftModel"]},
            'architectures = "DFlash2DraftModel"',
        ),
        ("zlab", {"model_type": "llama"}, 'model_type = "llama": must be "qwen3"'),
        ("zlab", {"layer_types": [FULL]}, "layer_types"),
        ("zlab", {"is_causal": True}, "is_causal = true: must be false or absent with full_attention layers"),
        (
            "zlab",
            {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0], "causal": True}},
            "dflash_config.causal = true: must be false or absent with full_attention layers",
        ),
        (
            "zlab",
            {"use_sliding_window": False},
            "use_sliding_window = false: must be true with sliding_attention layers",
        ),
        ("zlab", {"use_sliding_window": "no"}, 'use_sliding_window = "no"'),
        ("zlab", {"layer_types": None}, "layer_types: missing"),
        ("speculators", {"markov_head_type": "rnn"}, 'markov_head_type = "rnn": must be "vanilla"'),
        ("speculators", {"draft_vocab_size": 18}, "draft_vocab_size = 18: must be at most 17"),
        ("speculators", {"speculators_model_type": "dflash2"}, "speculators_model_type"),
        ("speculators", {"qkv_proj": True}, "qkv_proj = true: unknown field"),
        ("deepspec", {"mask_token_id": None}, "mask_token_id = null"),
    ],
)
def test_other_drafts_are_refused_in_one_line(tmp_path: Path, name: str, changed: dict[str, Any], message: str):
    PUBLIC[name].write(tmp_path, changed)
    with pytest.raises(ValueError) as error:
        read_public_config(tmp_path)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "others, message",
    [
        ({"markov_head.markov_w2.weight": None}, "markov_head.markov_w2.weight: missing"),
        ({"lm_head.weight": None}, "lm_head.weight: missing"),
        ({"confidence_head.proj.bias": None}, "confidence_head.proj.bias: missing"),
        ({"lm_head.weight": np.zeros((VOCAB, WIDTH), np.float32)}, "lm_head.weight: has shape (17, 12)"),
        ({"d2t": None, "t2d": None}, "d2t: missing; must be present for a draft_vocab_size of 5 out of 17"),
        ({"d2t": np.array([0, 2, 2, 6, 13])}, "d2t: target_ids: range from 0 to 17"),
        ({"d2t": np.zeros(4, np.int64)}, "d2t: is int64 (4,); must be int64 (5,)"),
        ({"t2d": np.ones(VOCAB, bool)}, "t2d: must be 17 flags that mark the ids of d2t"),
    ],
)
def test_a_missing_or_wrong_tensor_is_named(tmp_path: Path, others: dict[str, np.ndarray | None], message: str):
    PUBLIC["speculators"].write(tmp_path, **others)
    with pytest.raises(ValueError) as error:
        load_public_draft(tmp_path, ONE)
    assert message in str(error.value) and "\n" not in str(error.value)

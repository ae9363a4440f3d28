"""EAGLE-3 heads from and to the two public dialects: what is kept, and what is converted."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from models.config import DecoderConfig
from models.files import read_json
from models.hf.drafts.carried import PolicyTable, carried_tensors, check_copies, write_carried
from models.hf.drafts.reader import load_public_draft
from models.hf.drafts.stated_policy import StatedPolicy, check_stated_policy, stated_policy
from models.hf.drafts.writer import save_public_draft
from models.params import by_path
from models.rope import Llama3Scaling
from specjax.parallel.mesh import MeshConfig, make_mesh
from tests.models.eagle3_checkpoints import LAYERS, ONE, REDUCED, VOCAB, WIDTH, Public, loaded
from tests.models.parity import described
from tests.refusals import refuses

EIGHT = make_mesh(MeshConfig(data=2, fsdp=4))
SPECFORGE, SPECULATORS = Public(), Public(dialect="speculators")
SCALING = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
PUBLISHED = {
    "specforge": SPECFORGE,
    "specforge 3.1": Public(
        flags=("fc_norm", "norm_output"), config={"rope_scaling": {**SCALING, "rope_type": "llama3"}}
    ),
    "specforge, all of the vocabulary": Public(ids=None),
    "specforge, last hidden": Public(use_aux_hidden_state=False),
    "specforge, defaults": Public(ids=None, config={"eagle_config": None, "draft_vocab_size": None}),
    "speculators": SPECULATORS,
    "speculators 3.1": replace(SPECULATORS, flags=("norm_before_fc", "norm_before_residual", "norm_output")),
    "speculators, Qwen3 layers": replace(SPECULATORS, qk_norm=True, num_layers=2, window=7, layers=(1, 5)),
}


EMBEDDING = np.random.default_rng(0).normal(size=(VOCAB, WIDTH)).astype(np.float32)
# Tensors that a file may leave out, or hold in addition to its parameters.
BESIDE: dict[str, tuple[Public, dict[str, np.ndarray | None]]] = {
    "a copy of the embedding": (SPECFORGE, {"embed_tokens.weight": EMBEDDING}),
    "the copy in another dtype": (SPECULATORS, {"embed_tokens.weight": EMBEDDING.astype(jnp.bfloat16)}),
    "no flags": (SPECULATORS, {"t2d": None}),
    "offsets of 32 bits": (SPECFORGE, {"d2t": SPECFORGE.tensors()["d2t"].astype(np.int32)}),
    "maps of all of the vocabulary": (
        replace(SPECFORGE, ids=None),
        {"d2t": np.zeros(VOCAB, np.int64), "t2d": np.ones(VOCAB, bool)},
    ),
}


def check_embedding(directory: Path, table: np.ndarray) -> None:
    check_copies(directory, {"embed_tokens.weight": PolicyTable(jnp.asarray(table, jnp.float32))})


def tensors_of(directory: Path) -> dict[str, np.ndarray]:
    return load_file(directory / "model.safetensors")


@pytest.mark.parametrize("name", PUBLISHED | BESIDE)
def test_a_round_trip_keeps_every_byte_and_field(tmp_path: Path, name: str):
    public, changes = BESIDE[name] if name in BESIDE else (PUBLISHED[name], {})
    public.write(tmp_path / "in", **changes)
    draft, carried = load_public_draft(tmp_path / "in", EIGHT), carried_tensors(tmp_path / "in")
    assert carried is not None or name not in BESIDE
    source = read_json(tmp_path / "in/config.json")
    save_public_draft(tmp_path / "out", draft, public.dialect, source=source, carried=carried)
    expected = {name: x for name, x in {**public.tensors(), **changes}.items() if x is not None}
    assert described(tensors_of(tmp_path / "out")) == described(expected)
    assert read_json(tmp_path / "out/config.json") == public.fields()


def test_maps_of_another_vocabulary_are_not_written(tmp_path: Path):
    draft, carried = loaded(tmp_path, SPECFORGE), carried_tensors(tmp_path / "head")
    other = np.array(REDUCED, np.int32)
    other[0], other[1] = 1, 2
    save_public_draft(tmp_path / "out", draft._replace(target_ids=other), "specforge", carried=carried)
    np.testing.assert_array_equal(load_public_draft(tmp_path / "out", ONE).target_ids, other)


def test_carried_fields_are_read_back(tmp_path: Path):
    loaded(tmp_path, SPECFORGE, t2d=None, **{"embed_tokens.weight": EMBEDDING})
    (tmp_path / "ours/params").mkdir(parents=True)
    assert carried_tensors(tmp_path / "ours") is None
    check_embedding(tmp_path / "ours", EMBEDDING[::-1])
    carried = carried_tensors(tmp_path / "head")
    assert carried is not None
    write_carried(tmp_path / "ours", carried)
    rounded = carried | {"embed_tokens.weight": EMBEDDING.astype(jnp.bfloat16)}
    assert carried.keys() == {"d2t", "embed_tokens.weight"}
    for dtype, expected in ((None, carried), ("bfloat16", rounded)):
        found = carried_tensors(tmp_path / "ours", dtype)
        assert found is not None and described(found) == described(expected)
    with refuses("embed_tokens.weight:"):
        check_embedding(tmp_path / "ours", EMBEDDING[::-1])


@pytest.mark.parametrize("dialect", ["specforge", "speculators"])
@pytest.mark.parametrize("name", ["specforge 3.1", "speculators"])
def test_a_newly_written_config_describes_the_same_head(tmp_path: Path, name: str, dialect: Any):
    """This holds for both dialects, without the original config.json, as for a head that was trained here."""
    PUBLISHED[name].write(tmp_path / "in")
    draft = load_public_draft(tmp_path / "in", ONE)
    save_public_draft(tmp_path / "out", draft, dialect)
    again = load_public_draft(tmp_path / "out", ONE)
    assert again.config == draft.config and again.feature_layers == draft.feature_layers
    np.testing.assert_array_equal(again.target_ids, draft.target_ids)
    same = {path: np.array_equal(x, by_path(draft.params)[path]) for path, x in by_path(again.params).items()}
    assert all(same.values()) and len(same) == len(by_path(draft.params))


def test_layer_ids_are_counted_as_the_dialect_does(tmp_path: Path):
    SPECFORGE.write(tmp_path / "in")
    draft = load_public_draft(tmp_path / "in", ONE)
    assert draft.feature_layers == LAYERS == (2, 3, 4)
    save_public_draft(tmp_path / "specforge", draft, "specforge")
    save_public_draft(tmp_path / "speculators", draft, "speculators", StatedPolicy("someone/policy"))
    forge, library = (read_json(tmp_path / name / "config.json") for name in ("specforge", "speculators"))
    assert forge["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": True}
    assert library["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]
    assert library["speculators_config"]["verifier"]["name_or_path"] == "someone/policy"
    assert (forge["rope_theta"], library["transformer_layer_config"]["rope_theta"]) == (50.0, 50.0)
    assert forge["max_position_embeddings"] == library["transformer_layer_config"]["max_position_embeddings"] == 64


def test_a_trained_head_is_not_written_under_the_fields_of_another(tmp_path: Path):
    """The source's config.json describes only the source's head."""
    SPECFORGE.write(tmp_path / "in")
    source, draft = read_json(tmp_path / "in/config.json"), load_public_draft(tmp_path / "in", ONE)
    other = draft._replace(config=replace(draft.config, rope_theta=60.0))
    save_public_draft(tmp_path / "out", other, "specforge", source=source)
    assert read_json(tmp_path / "out/config.json")["rope_theta"] == 60.0


def test_optional_fields_of_a_file(tmp_path: Path):
    config, _, ids, layers = loaded(tmp_path / "a", PUBLISHED["specforge, defaults"])
    assert (config.vocab_size, config.draft_vocab_size, ids, layers) == (VOCAB, VOCAB, None, ())
    assert config.feature_size == 3 * WIDTH and config.use_aux_hidden_state
    flags = config.norm_before_fc, config.fc_norm, config.norm_before_residual, config.norm_output
    assert flags == (False, False, False, False)


def test_the_rope_is_the_heads_own(tmp_path: Path):
    """Stored frequencies are ignored."""
    frequencies = {"midlayer.self_attn.rotary_emb.inv_freq": np.ones(3, np.float32)}
    config = loaded(tmp_path, PUBLISHED["specforge 3.1"], **frequencies).config
    assert (config.rope_theta, config.rope_scaling) == (50.0, Llama3Scaling(**SCALING))
    assert config.max_positions == 64


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes_are_kept_or_converted(tmp_path: Path, dtype: str):
    floats = {name: x.astype(jnp.dtype(dtype)) for name, x in SPECFORGE.tensors().items() if x.dtype == np.float32}
    public = replace(SPECFORGE, config={"torch_dtype": dtype})
    draft = loaded(tmp_path, public, **floats)
    assert {x.dtype.name for x in by_path(draft.params).values()} == {dtype}
    save_public_draft(tmp_path / "out", draft, "specforge", source=public.fields())
    assert described(tensors_of(tmp_path / "out")) == described({**SPECFORGE.tensors(), **floats})
    assert read_json(tmp_path / "out/config.json") == public.fields()
    for name in ("specforge", "speculators"):
        save_public_draft(tmp_path / name, draft, name)
        fields = read_json(tmp_path / name / "config.json")
        assert {each["torch_dtype"] for each in (fields, fields.get("transformer_layer_config", fields))} == {dtype}
        assert load_public_draft(tmp_path / name, ONE).config == draft.config
    wide = by_path(load_public_draft(tmp_path / "head", ONE, "float32").params)
    np.testing.assert_array_equal(wide["norm", "scale"], floats["norm.weight"].astype(np.float32))


def test_a_copy_of_the_embedding(tmp_path: Path):
    """It may be rounded, and the policy's embedding may have changed since, by far more than RL changes it.

    Rows without a token are zero in both.
    """

    def check(other: np.ndarray) -> None:
        check_embedding(tmp_path / "head", other)

    loaded(tmp_path, SPECFORGE)
    check(EMBEDDING[::-1])  # there is none
    padded = np.concatenate([EMBEDDING[:-1], np.zeros_like(EMBEDDING[:1])])
    draft = loaded(tmp_path, SPECFORGE, **{"embed_tokens.weight": padded.astype(jnp.bfloat16)})
    assert ("embed_tokens",) not in by_path(draft.params)
    noise = np.random.default_rng(1).normal(size=padded.shape)
    check(padded)
    check(padded * (1 + 0.2 * noise))
    for other in (padded[::-1], padded[:-1], np.zeros_like(padded), padded + noise):
        with refuses("embed_tokens.weight:"):
            check(other)


def test_written_files_state_the_policys_family(tmp_path: Path):
    draft = loaded(tmp_path, SPECULATORS)
    shape = dict(hidden_size=WIDTH, intermediate_size=8, num_layers=8, num_heads=1, num_kv_heads=1, head_dim=8)
    llama = DecoderConfig(**shape, vocab_size=VOCAB)
    qwen3, strange = replace(llama, qk_norm=True), replace(llama, qk_norm=True, qkv_bias=True)
    for name, policy, family in (("a", llama, ["LlamaForCausalLM"]), ("b", strange, [])):
        save_public_draft(tmp_path / name, draft, "speculators", stated_policy(policy, "someone/policy"))
        stated = read_json(tmp_path / name / "config.json")["speculators_config"]["verifier"]
        assert stated == {"name_or_path": "someone/policy", "architectures": family}
    check_stated_policy(read_json(tmp_path / "a/config.json"), llama)
    check_stated_policy(SPECFORGE.fields(), qwen3)
    with refuses("made for LlamaForCausalLM (someone/policy)...Qwen3ForCausalLM"):
        check_stated_policy(read_json(tmp_path / "a/config.json"), qwen3)


def test_pytorch_files_need_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    (tmp_path / "config.json").write_text(json.dumps(SPECFORGE.fields()))
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with refuses("/pytorch_model.bin:...torch", ImportError):
        load_public_draft(tmp_path, ONE)


def test_broken_pytorch_files(tmp_path: Path):
    torch = pytest.importorskip("torch")
    (tmp_path / "config.json").write_text(json.dumps(SPECFORGE.fields()))
    path = tmp_path / "pytorch_model.bin"
    torch.save({"fc.weight": torch.ones(9)}, path)
    whole = path.read_bytes()
    for other in (b"", b"no tensors", whole[: len(whole) // 2], [1, 2], {"fc.weight": "text"}):
        path.write_bytes(other) if isinstance(other, bytes) else torch.save(other, path)
        with refuses("/pytorch_model.bin:"):
            load_public_draft(tmp_path, ONE)


def test_pytorch_files(tmp_path: Path):
    torch = pytest.importorskip("torch")
    SPECFORGE.write(tmp_path / "safe")
    tensors = {name: torch.from_numpy(x.copy()) for name, x in SPECFORGE.tensors().items()}
    tensors["fc.weight"] = tensors["fc.weight"].bfloat16()
    tensors["midlayer.self_attn.rotary_emb.inv_freq"] = torch.ones(3)  # as old checkpoints of either kind hold it
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/config.json").write_text(json.dumps(SPECFORGE.fields()))
    torch.save(tensors, tmp_path / "torch/pytorch_model.bin")
    found, expected = (load_public_draft(tmp_path / name, ONE) for name in ("torch", "safe"))
    np.testing.assert_array_equal(found.target_ids, expected.target_ids)
    for path, x in by_path(found.params).items():
        wanted = by_path(expected.params)[path].astype(x.dtype)
        assert (x.dtype == jnp.bfloat16) == (path == ("fc", "kernel"))
        np.testing.assert_array_equal(x, wanted)

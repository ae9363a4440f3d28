"""MTP heads in the policy's checkpoint: what is read, what is refused, and what is written back."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models.hf.config import read_hf_config
from models.hf.drafts.mtp import load_mtp
from models.hf.load import load_policy
from models.hf.save import save_policy
from models.params import by_path
from specjax.parallel.mesh import MeshConfig, make_mesh
from tests.models.mtp_reference import FAMILIES, VOCAB, WIDTH, hf_fields, write_checkpoint
from tests.models.parity import described
from tests.refusals import refuses

ONE, EIGHT = make_mesh(MeshConfig()), make_mesh(MeshConfig(data=2, fsdp=4))


@pytest.mark.parametrize("convention", FAMILIES)
def test_saving_a_head_with_its_policy_keeps_every_byte_and_name(tmp_path: Path, convention: str):
    source, out = tmp_path / "source", tmp_path / "out"
    tensors = write_checkpoint(source, convention)
    decoder = read_hf_config(source, ())
    head = load_mtp(source, decoder, EIGHT)
    assert head is not None
    save_policy(out, load_policy(source, decoder, EIGHT), decoder, mtp=head)
    assert described(load_file(out / "model.safetensors")) == described(tensors)
    assert read_hf_config(out, ()) == decoder
    fields, written = hf_fields(convention), json.loads((out / "config.json").read_text())
    assert {**written, "attention_bias": fields["attention_bias"]}.items() >= fields.items()
    again = load_mtp(out, decoder, ONE, "bfloat16")
    assert again is not None and again[0] == head[0]
    for path, x in by_path(again[1]).items():
        np.testing.assert_array_equal(x, by_path(head[1])[path].astype("bfloat16"))


def test_a_policy_without_its_head(tmp_path: Path):
    """A policy exported without its head has a config.json that names none, as does a policy that never had one."""
    source, out = tmp_path / "source", tmp_path / "out"
    write_checkpoint(source, "mimo")
    decoder = read_hf_config(source, ())
    save_policy(out, load_policy(source, decoder, ONE), decoder)
    assert load_mtp(out, decoder, ONE) is None
    assert not any("mtp" in name for name in load_file(out / "model.safetensors"))


def test_the_head_must_fit_to_be_stitched(tmp_path: Path):
    write_checkpoint(tmp_path / "source", "mimo")
    decoder = read_hf_config(tmp_path / "source", ())
    head = load_mtp(tmp_path / "source", decoder, ONE)
    assert head is not None
    params = {name: part for name, part in head[1].items() if name != "fc"}
    with refuses(f"mtp: fc.kernel...({2 * WIDTH}, {WIDTH})"):
        save_policy(tmp_path / "out", load_policy(tmp_path / "source", decoder, ONE), decoder, mtp=(head[0], params))


COUNT, LAYER = "num_nextn_predict_layers", "model.layers.1"
HEAD_COPY, EXPERT = f"{LAYER}.embed_tokens.weight", f"{LAYER}.mlp.experts.0.up_proj.weight"
SECOND, QUERY = "mtp.layers.1.input_layernorm.weight", "mtp.layers.0.self_attn.q_proj.weight"
OTHER = "model.mtp_layers.0.input_proj.weight"
# Fields and tensors to change (None removes all tensors with this prefix), and the expected message.
MTP_REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, np.ndarray | None], str]] = {
    "several layers": ("mimo", {COUNT: 2}, {}, f"config.json: {COUNT} = 2: ...1"),
    "none announced": ("mimo", {COUNT: 0}, {}, f"config.json: {COUNT} = 0: ...1"),
    "a second layer": ("qwen3_next", {}, {SECOND: np.ones(WIDTH, "f")}, f"{SECOND}: "),
    "another convention": ("qwen3_next", {}, {OTHER: np.ones((WIDTH, 2 * WIDTH), "f")}, f"{OTHER}: "),
    "missing": ("deepseek_v3", {}, {f"{LAYER}.hnorm.weight": None, HEAD_COPY: None}, f"{HEAD_COPY}: ...1"),
    "experts": ("deepseek_v3", {}, {EXPERT: np.ones((4, WIDTH), "f")}, f"{EXPERT}: "),
    "gated attention": ("qwen3_next", {}, {QUERY: np.ones((48, WIDTH), "f")}, f"{QUERY}: ...(48, 12)"),
    "another embedding": ("deepseek_v3", {}, {HEAD_COPY: np.ones((VOCAB, WIDTH), "f")}, f"{HEAD_COPY}: "),
    "no tensors": ("qwen3_next", {}, {"mtp.": None}, "config.json: mtp_num_hidden_layers = 1: ...0"),
}


def rewrite(directory: Path, convention: str, fields: dict[str, Any], changes: dict[str, np.ndarray | None]) -> None:
    """Change fields of the checkpoint, and replace, add or (None) remove tensors; None applies to a prefix."""
    tensors = write_checkpoint(directory, convention)
    removed = tuple(name for name, x in changes.items() if x is None)
    kept = {name: x for name, x in tensors.items() if not name.startswith(removed or ("nothing",))}
    save_file(kept | {name: x for name, x in changes.items() if x is not None}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(hf_fields(convention) | fields))


@pytest.mark.parametrize("name", MTP_REFUSED)
def test_refused_heads_leave_the_policy_loadable(tmp_path: Path, name: str):
    convention, fields, changes, message = MTP_REFUSED[name]
    directory = tmp_path / "checkpoint"
    rewrite(directory, convention, fields, changes)
    decoder = read_hf_config(directory, ())
    with refuses(message):
        load_mtp(directory, decoder, ONE)
    load_policy(directory, decoder, ONE)


def test_a_config_with_too_few_layers_is_refused(tmp_path: Path):
    """A layer after the last one belongs to a head only if it has an `eh_proj`."""
    rewrite(tmp_path / "cut", "deepseek_v3", {}, {"model.layers.1.eh_proj.weight": None})
    with refuses("model.layers.1.embed_tokens.weight:...13"):
        load_policy(tmp_path / "cut", read_hf_config(tmp_path / "cut", ()), ONE)


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ({"kv_lora_rank": 512}, "kv_lora_rank = 512:"),
        ({"attn_output_gate": True}, "attn_output_gate = true:"),
        ({"model_type": "qwen3_next"}, 'model_type = "qwen3_next":'),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings = true:"),
    ],
)
def test_blocks_that_the_decoder_lacks_are_refused(tmp_path: Path, field: dict[str, Any], said: str):
    (tmp_path / "config.json").write_text(json.dumps(hf_fields("deepseek_v3") | field))
    with refuses(f"{tmp_path}/config.json: {said}"):
        read_hf_config(tmp_path, ())

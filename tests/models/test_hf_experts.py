"""Checkpoints with a mixture of experts. The tensors of a layer's experts are stacked and read by shard."""

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models.config import ExpertsConfig
from models.hf.config import config_from_hf, config_to_hf, read_hf_config
from models.hf.layout import stored_tensors
from models.hf.load import load_policy
from models.hf.save import save_policy
from models.params import by_path
from specjax.parallel.mesh import MeshConfig, make_mesh
from tests.models.parity import FEATURE_LAYERS, GOLDEN, Case, close, described
from tests.models.test_hf_config import PUBLISHED
from tests.refusals import refuses

DIRECTORY = GOLDEN / "qwen3_moe"
CONFIG = read_hf_config(DIRECTORY, FEATURE_LAYERS)
EXPERT = "model.layers.2.mlp.experts.3.up_proj.weight"
MESHES = [MeshConfig(expert=4), MeshConfig(data=2, expert=2, tensor=2)]


def test_published_configs():
    for name, layers, width in (("qwen3_30b_a3b", 48, 768), ("qwen3_235b_a22b", 94, 1536)):
        config = config_from_hf(PUBLISHED[name])
        assert config.experts == ExpertsConfig(
            num_experts=128, active=8, intermediate_size=width, norm_topk_prob=True, layers=None
        )
        assert (config.num_layers, config.num_kv_heads, config.qk_norm) == (layers, 4, True)
        assert config.expert_layers == tuple(range(layers))
        assert config_from_hf(config_to_hf(config)) == config


def fields(**changes: Any) -> dict[str, Any]:
    """Return a config.json with these fields changed. The value ... removes a field."""
    changed = {**PUBLISHED["qwen3_30b_a3b"], "num_hidden_layers": 8, **changes}
    return {name: value for name, value in changed.items() if value is not ...}


def test_which_layers_have_experts():
    assert config_from_hf(fields(decoder_sparse_step=2)).expert_layers == (1, 3, 5, 7)
    mixed = config_from_hf(fields(decoder_sparse_step=2, mlp_only_layers=[0, 3]))
    assert mixed.expert_layers == (1, 5, 7)
    again = config_to_hf(mixed)
    assert (again["model_type"], again["mlp_only_layers"]) == ("qwen3_moe", [0, 2, 3, 4, 6])
    assert config_from_hf(again) == mixed


def test_both_names_of_the_count_and_optional_fields():
    other = fields(num_experts=..., num_local_experts=64, norm_topk_prob=..., mlp_only_layers=None)
    experts = config_from_hf(other).experts
    assert experts is not None and (experts.num_experts, experts.norm_topk_prob) == (64, False)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(num_local_experts=64), "num_experts = 128: ...num_local_experts = 64"),
        (dict(num_experts=...), "num_local_experts = null: must be a positive integer"),
        (dict(num_experts_per_tok=129), "active = 129: "),
        (dict(moe_intermediate_size=...), "moe_intermediate_size = null: "),
        (dict(mlp_only_layers=list(range(8))), "mlp_only_layers = [0, 1, 2, 3, 4, 5, 6, 7]: "),
        (dict(decoder_sparse_step=0), "decoder_sparse_step = 0: "),
        (dict(norm_topk_prob=1), "norm_topk_prob = 1: "),
        (dict(use_sliding_window=True), "use_sliding_window = true: "),
        (dict(model_type="qwen3", architectures=...), "decoder_sparse_step = 1: unknown field"),
        (dict(shared_expert_intermediate_size=8), "shared_expert_intermediate_size = 8: unknown field"),
    ],
)
def test_refused_fields(changes: dict[str, Any], message: str):
    with refuses(message):
        config_from_hf(fields(**changes))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_logits_of_transformers_on_every_mesh(mesh: MeshConfig):
    """Some layers are dense."""
    assert CONFIG.expert_layers == (0, 2, 3)
    on = make_mesh(mesh)
    with np.load(DIRECTORY / "expected.npz") as expected, jax.set_mesh(on):
        # A fourth row, so that the mesh divides the batch.
        tokens, logits = (np.concatenate([expected[name], expected[name][:1]]) for name in ("tokens", "logits"))
        case = Case(CONFIG, load_policy(DIRECTORY, CONFIG, on), {})
        close(case.apply(tokens, np.zeros(4)).logits, logits)


@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(fsdp=2, expert=2, tensor=2)], ids=str)
def test_round_trip_keeps_every_byte(tmp_path: Path, mesh: MeshConfig):
    params = load_policy(DIRECTORY, CONFIG, make_mesh(mesh))
    assert by_path(params)["layer_0", "mlp", "experts", "gate"].shape == (8, 16, 12)
    save_policy(tmp_path / "out", params, CONFIG, max_file_bytes=10_000)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    written = {name: x for file in files for name, x in load_file(file).items()}
    assert len(files) > 5 and all(file.stat().st_size < 15_000 for file in files)
    assert described(written) == described(load_file(DIRECTORY / "model.safetensors"))
    assert read_hf_config(tmp_path / "out", FEATURE_LAYERS) == CONFIG


def test_a_shard_of_experts_reads_its_part_of_its_experts():
    stored = stored_tensors(CONFIG)["model.layers.0.mlp.experts.5.up_proj.weight"]
    assert (stored.path, stored.place) == (("layer_0", "mlp", "experts", "up"), 5)
    shape, index = (8, 16, 12), (slice(4, 8), slice(0, 8), slice(6, 12))
    assert stored.of(shape) == (16, 12) and stored.shape(stored.of(shape)) == (12, 16)
    assert stored.index(stored.of(index), stored.of(shape)) == (slice(6, 12), slice(0, 8))


@pytest.mark.parametrize(
    "change, message",
    [
        (None, f"{EXPERT}: missing"),
        (np.ones((12, 15), np.float32), f"{EXPERT}: ...(12, 15)...(12, 16)"),
        (np.ones((12, 16), np.float16), f"{EXPERT}: dtype F16...F32"),
        (np.full((12, 16), np.nan, np.float32), "layer_2.mlp.experts.up: 192 of 1536"),
    ],
    ids=["missing", "shape", "dtype", "nan"],
)
def test_refused_tensors(tmp_path: Path, change: np.ndarray | None, message: str):
    shutil.copytree(DIRECTORY, tmp_path / "changed")
    tensors = {**load_file(DIRECTORY / "model.safetensors"), EXPERT: change}
    tensors = {name: x for name, x in tensors.items() if x is not None}
    save_file(tensors, tmp_path / "changed" / "model.safetensors", metadata={"format": "pt"})
    with refuses(message if message.startswith("model") else f"...{message}"):
        load_policy(tmp_path / "changed", CONFIG, make_mesh(MeshConfig(expert=2)))

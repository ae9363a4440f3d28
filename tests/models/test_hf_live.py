"""Our decoder agrees with transformers on new random checkpoints. Runs only if torch is installed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.hf.config import read_hf_config
from models.hf.load import load_policy
from models.hf.save import save_policy
from specjax.parallel.mesh import MeshConfig, make_mesh
from tests.models.parity import FEATURE_LAYERS, check_cached_decode, check_full_forward, load_case

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
make_golden = pytest.importorskip("tests.golden.make_golden")

CONFIGS = {
    "qwen3": lambda **options: transformers.Qwen3Config(head_dim=8, **options),
    "qwen3_moe": lambda **options: transformers.Qwen3MoeConfig(head_dim=8, **make_golden.MIXTURE, **options),
    "qwen2": transformers.Qwen2Config,
    "llama": lambda **options: transformers.LlamaConfig(
        max_position_embeddings=256, **{**options, "rope_parameters": make_golden.LLAMA3}
    ),
    "mistral": lambda **options: transformers.MistralConfig(
        sliding_window=9, max_position_embeddings=256, **{**options, "rope_parameters": make_golden.YARN}
    ),
    "qwen2_windows": lambda **options: transformers.Qwen2Config(
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=3,
        **{**options, "rope_parameters": make_golden.LINEAR},
    ),
}


def random_checkpoint(directory: Path, family: str, gqa: int = 2, tied: bool = False, dtype: str = "float32") -> Any:
    """Return a random model of the family with four query heads, which transformers has written."""
    config = CONFIGS[family](
        **{**make_golden.SHAPE, "dtype": dtype},
        num_attention_heads=4,
        num_key_value_heads=4 // gqa,
        tie_word_embeddings=tied,
        rope_parameters=dict(rope_type="default", rope_theta=20_000.0),
    )
    model = make_golden.random_model(config, seed=10 * gqa + tied).to(getattr(torch, dtype))
    model.save_pretrained(directory)
    return model


def check_same(model: Any, directory: Path) -> None:
    """Verify that transformers loads all of the model's parameters from the directory, bit for bit."""
    again, report = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="auto", output_loading_info=True)
    assert not any(report[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    expected, found = model.state_dict(), again.state_dict()
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == found[name].dtype and torch.equal(tensor, found[name]), name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("gqa", [1, 2, 4])
@pytest.mark.parametrize("family", list(CONFIGS))
def test_logits_and_export(tmp_path: Path, family: str, gqa: int, tied: bool):
    model = random_checkpoint(tmp_path / "source", family, gqa, tied)
    config = tmp_path / "source" / "config.json"
    if gqa > 1:
        config.write_text(json.dumps(make_golden.as_transformers_4(json.loads(config.read_text()))))
    tokens = np.random.default_rng(gqa).integers(0, 64, (3, 40), dtype=np.int32)
    case = load_case(tmp_path / "source", make_golden.expected(model, tokens))
    check_full_forward(case)
    if not tied:  # tying changes nothing in the cache
        check_cached_decode(case)
    save_policy(tmp_path / "export", case.params, case.config)
    check_same(model, tmp_path / "export")


@pytest.mark.parametrize("family", list(CONFIGS))
def test_bfloat16_export(tmp_path: Path, family: str):
    model = random_checkpoint(tmp_path / "source", family, dtype="bfloat16")
    config = read_hf_config(tmp_path / "source", FEATURE_LAYERS)
    params = load_policy(tmp_path / "source", config, make_mesh(MeshConfig()))
    save_policy(tmp_path / "export", params, config, max_file_bytes=10_000)
    check_same(model, tmp_path / "export")

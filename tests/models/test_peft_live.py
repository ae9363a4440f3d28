"""Our adapters agree with peft's, in both directions. Runs only if torch and peft are installed."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.decoder import make_policy
from models.hf.config import read_hf_config
from models.hf.load import load_policy
from models.hf.peft_files import load_adapters, read_peft, save_adapters
from models.lora import with_scales
from specjax.adapters import joined
from specjax.parallel.mesh import MeshConfig, make_mesh
from specjax.types import Params
from tests.models.parity import GOLDEN, close

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
# peft reads attributes that transformers deprecates.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": dict(target_modules="all-linear", lora_alpha=4, alpha_pattern={"^model.layers.[12].mlp.*": 9}),
    "qwen2": dict(
        target_modules=r".*\.(q_proj|o_proj|up_proj)", exclude_modules=["1.self_attn.q_proj"], use_rslora=True
    ),
    "qwen3": dict(target_modules=["v_proj", "down_proj"], rank_pattern={"2.mlp.down_proj": 5, "v_proj": 2}),
    "qwen3_moe": dict(target_modules=ATTENTION, lora_alpha=16),
}


def base_model(case: str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(GOLDEN / case, attn_implementation="eager").eval()


def torch_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(tokens).long(), use_cache=False).logits.numpy()


@pytest.mark.parametrize("case", list(CONFIGS))
def test_logits_both_ways(tmp_path: Path, case: str):
    tokens = np.random.default_rng(3).integers(0, 64, (2, 20), dtype=np.int32)
    config = peft.LoraConfig(**{"r": 3, "task_type": "CAUSAL_LM", **CONFIGS[case]})
    theirs = peft.get_peft_model(base_model(case), config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    expected = torch_logits(theirs, tokens)
    assert np.abs(expected - torch_logits(base_model(case), tokens)).max() > 0.1
    theirs.save_pretrained(tmp_path / "theirs")

    decoder, mesh = read_hf_config(GOLDEN / case, ()), make_mesh(MeshConfig())
    layers = read_peft(tmp_path / "theirs", decoder)
    adapters = load_adapters(tmp_path / "theirs", layers, decoder, mesh)
    params = Params(adapters, {}, base=with_scales(load_policy(GOLDEN / case, decoder, mesh), layers, mesh))
    apply = jax.jit(make_policy(decoder).apply)
    close(apply(joined(params).policy, jnp.asarray(tokens), jnp.zeros(2, jnp.int32)).logits, expected)

    save_adapters(tmp_path / "ours", adapters, layers, decoder, str(GOLDEN / case))
    again = peft.PeftModel.from_pretrained(base_model(case), tmp_path / "ours")
    assert {"lora_A", "lora_B"} == {name.split(".")[-3] for name in again.state_dict() if "lora_" in name}
    np.testing.assert_array_equal(torch_logits(again, tokens), expected)

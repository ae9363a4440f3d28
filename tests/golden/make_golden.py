"""Write the checkpoints in this folder, and the outputs of torch and transformers for them.

`python tests/golden/make_golden.py`, run with torch 2.13.0 and transformers 5.23.0. Each directory is a Hugging Face
checkpoint of a tiny random decoder. Its `expected.npz` holds tokens [B, T] and, in float32, the logits, the residual
stream at the input of FEATURE_LAYERS (concatenated), and the last hidden state after the final norm. `rope.json` holds
the frequencies and the attention factor for each kind of rope scaling.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

HERE = Path(__file__).parent
FEATURE_LAYERS = (1, 2, 3)
SHAPE = dict(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=4, dtype="float32")
# With base 100 and 8 rotary dimensions the wavelengths are 6, 20, 63 and 199 positions. For 32 original positions, the
# first band is kept, the second blended and the others stretched. The sequences are longer than 32.
LLAMA3 = dict(rope_type="llama3", rope_theta=100.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3["original_max_position_embeddings"] = 32
LINEAR = dict(rope_type="linear", rope_theta=100.0, factor=3.0)
# The first of the four bands is kept, the second blended, and the others stretched.
YARN = dict(rope_type="yarn", rope_theta=100.0, factor=8.0, original_max_position_embeddings=32)
ROPES = (
    LINEAR,
    LLAMA3,
    YARN,
    {**YARN, "rope_theta": 1e4, "original_max_position_embeddings": 4096, "beta_fast": 16.0, "beta_slow": 2.0},
    {**YARN, "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False},
    {**YARN, "attention_factor": 0.9},
    {**YARN, "factor": 1.0},
)
# In every other layer, and shorter than the sequences.
WINDOW = dict(use_sliding_window=True, sliding_window=7, layer_types=["full_attention", "sliding_attention"] * 2)

# A dense layer among layers with experts.
MIXTURE = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=12, norm_topk_prob=True, mlp_only_layers=[1])


def random_model(config: PreTrainedConfig, seed: int) -> torch.nn.Module:
    """Return a model in which every parameter matters, norm scales and biases too, and attention is not uniform."""
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(noise * 1.2 / math.sqrt(parameter.shape[-1]))
            else:
                parameter.copy_(noise * 0.5 if name.endswith("bias") else 1 + 0.3 * noise)
    return model


def as_transformers_4(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the `config.json` that transformers 4 writes for the same model."""
    fields = dict(fields)
    rope = fields.pop("rope_parameters")
    fields["rope_theta"] = rope.pop("rope_theta")
    fields["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    fields["torch_dtype"] = fields.pop("dtype")
    return {**fields, "transformers_version": "4.51.0"}


def expected(model: torch.nn.Module, tokens: np.ndarray) -> dict[str, np.ndarray]:
    with torch.no_grad():
        output = model(torch.from_numpy(tokens).long(), output_hidden_states=True, use_cache=False)
    features = torch.cat([output.hidden_states[i] for i in FEATURE_LAYERS], dim=-1)
    arrays = dict(logits=output.logits, features=features, hidden=output.hidden_states[-1])
    return {"tokens": tokens, **{name: x.float().numpy() for name, x in arrays.items()}}


def write(name: str, config: PreTrainedConfig, seed: int, length: int, transformers_4: bool) -> None:
    directory = HERE / name
    shutil.rmtree(directory, ignore_errors=True)
    random_model(config, seed).save_pretrained(directory)
    if transformers_4:
        path = directory / "config.json"
        path.write_text(json.dumps(as_transformers_4(json.loads(path.read_text())), indent=2) + "\n")
    # Load the saved files again, so that the expected values are those of the files.
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    tokens = np.random.default_rng(seed).integers(0, SHAPE["vocab_size"], (3, length), dtype=np.int32)
    np.savez_compressed(directory / "expected.npz", **expected(model, tokens))


def rope_parity(rope: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Return the rope parameters with the angles that transformers computes from them."""
    config = LlamaConfig(head_dim=head_dim, rope_parameters=dict(rope))
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    return {"rope": rope, "head_dim": head_dim, "frequencies": frequencies.tolist(), "attention_factor": factor}


def main() -> None:
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    rope = dict(rope_type="default", rope_theta=1_000_000.0)
    qwen3 = Qwen3Config(**SHAPE, **heads, tie_word_embeddings=True, rope_parameters=rope)
    heads, rope = dict(num_attention_heads=4, num_key_value_heads=1), dict(rope_type="default", rope_theta=500.0)
    qwen2 = Qwen2Config(**SHAPE, **heads, rms_norm_eps=1e-5, rope_parameters=rope)
    heads = dict(num_attention_heads=2, num_key_value_heads=2)
    llama = LlamaConfig(**SHAPE, **heads, max_position_embeddings=256, rope_parameters=LLAMA3)
    write("qwen3", qwen3, seed=1, length=24, transformers_4=False)
    write("qwen2", qwen2, seed=2, length=24, transformers_4=True)
    write("llama", llama, seed=3, length=44, transformers_4=True)
    moe_heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8, rope_parameters=rope)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    windows = Qwen3Config(**SHAPE, **WINDOW, **heads, rope_parameters=YARN)
    write("qwen3_windows", windows, seed=4, length=44, transformers_4=False)
    write("qwen3_moe", Qwen3MoeConfig(**SHAPE, **MIXTURE, **moe_heads), seed=5, length=24, transformers_4=False)
    ropes = [rope_parity(rope, head_dim) for rope in ROPES for head_dim in (8, 16)]
    (HERE / "rope.json").write_text(json.dumps(ropes, indent=1) + "\n")
    # The first model again, in bfloat16 and split over several files.
    directory = HERE / "qwen3_sharded"
    shutil.rmtree(directory, ignore_errors=True)
    random_model(qwen3, seed=1).to(torch.bfloat16).save_pretrained(directory, max_shard_size=10_000)


if __name__ == "__main__":
    main()

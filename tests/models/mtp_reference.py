"""Independent implementation of MTP heads in numpy, in float64 and one token at a time, for each family.

Follows each family's published code. Weights have the names and [out, in] layouts of the public checkpoints; policy and
head are in one dictionary.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.models.eagle3_reference import Past, Shape, Weights, attend, mlp, rms_norm

VOCAB, WIDTH, INNER = 17, 12, 16
SHAPE = Shape(heads=4, kv_heads=2, head_dim=6, rope_theta=50.0, eps=1e-3)


@dataclass(frozen=True)
class Family:
    """Names of a family's parts in its code, and their order.

    around: the norms of the embedding and of the hidden state, their projection, and the norm before `unembed`.
    """

    around: tuple[str, str, str, str]
    block: str
    unembed: str
    hidden_first: bool = False
    masks_first_embedding: bool = True
    feeds_back_normed: bool = True


LAYER, MIMO = "model.layers.1.", "model.mtp_layers.0."
FAMILIES = {
    "qwen3_next": Family(
        ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
        "mtp.layers.0.",
        "model.embed_tokens",
        masks_first_embedding=False,
    ),
    "deepseek_v3": Family(
        (LAYER + "enorm", LAYER + "hnorm", LAYER + "eh_proj", LAYER + "shared_head.norm"),
        LAYER,
        LAYER + "shared_head.head",
        feeds_back_normed=False,
    ),
    "mimo": Family(
        (MIMO + "token_layernorm", MIMO + "hidden_layernorm", MIMO + "input_proj", MIMO + "final_layernorm"),
        MIMO,
        "lm_head",
        hidden_first=True,
    ),
}


def step(
    family: Family, w: Weights, hidden: np.ndarray, embedding: np.ndarray, position: int, past: Past
) -> tuple[np.ndarray, np.ndarray]:
    """Return (draft logits, hidden to feed back) of one position. Appends its keys and values to `past`."""
    embedding_norm, hidden_norm, fc, norm = (w[f"{name}.weight"] for name in family.around)
    masked = family.masks_first_embedding and position == 0
    e = rms_norm(0 * embedding if masked else embedding, embedding_norm, SHAPE.eps)
    h = rms_norm(hidden, hidden_norm, SHAPE.eps)
    x = fc @ np.concatenate([h, e] if family.hidden_first else [e, h])
    own = {name.removeprefix(family.block): weight for name, weight in w.items() if name.startswith(family.block)}
    x = x + attend(own, SHAPE, rms_norm(x, own["input_layernorm.weight"], SHAPE.eps), position, past[0])
    x = x + mlp(own, SHAPE, x)
    normed = rms_norm(x, norm, SHAPE.eps)
    return w[f"{family.unembed}.weight"] @ normed, normed if family.feeds_back_normed else x


def _block_shapes(prefix: str, qk_norm: bool, qkv_bias: bool) -> dict[str, tuple[int, ...]]:
    inner, outer = SHAPE.heads * SHAPE.head_dim, SHAPE.kv_heads * SHAPE.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        **{f"self_attn.{name}_proj.weight": (inner if name == "q" else outer, WIDTH) for name in "qkv"},
        "self_attn.o_proj.weight": (WIDTH, inner),
        **{f"mlp.{name}_proj.weight": (INNER, WIDTH) for name in ("gate", "up")},
        "mlp.down_proj.weight": (WIDTH, INNER),
        **{f"{name}_layernorm.weight": (WIDTH,) for name in ("input", "post_attention")},
    }
    if qk_norm:
        shapes |= {f"self_attn.{name}_norm.weight": (SHAPE.head_dim,) for name in "qk"}
    if qkv_bias:
        shapes |= {f"self_attn.{name}_proj.bias": (inner if name == "q" else outer,) for name in "qkv"}
    return {prefix + name: shape for name, shape in shapes.items()}


def _shapes(convention: str) -> dict[str, tuple[int, ...]]:
    """Return random weights of a policy of one layer and its head."""
    options = dict(qk_norm=convention == "qwen3_next", qkv_bias=convention == "mimo")
    policy = {
        "model.embed_tokens.weight": (VOCAB, WIDTH),
        **_block_shapes("model.layers.0.", **options),
        "model.norm.weight": (WIDTH,),
    }
    family = FAMILIES[convention]
    own = {} if convention == "qwen3_next" else {"lm_head.weight": (VOCAB, WIDTH)}
    if convention == "deepseek_v3":
        own |= {f"{LAYER}{name}.weight": (VOCAB, WIDTH) for name in ("shared_head.head", "embed_tokens")}
    sizes = [(WIDTH,), (WIDTH,), (WIDTH, 2 * WIDTH), (WIDTH,)]
    around = {f"{name}.weight": size for name, size in zip(family.around, sizes, strict=True)}
    return {**policy, **around, **_block_shapes(family.block, **options), **own}


def write_checkpoint(directory: Path, convention: str) -> dict[str, np.ndarray]:
    """Write a policy with its head in Hugging Face layout, and return the random weights.

    The head `qwen3_next` gets a tied Qwen3 as its policy, `deepseek_v3` a Llama, and `mimo` a MiMo. Kernels are large,
    norms lie between 0.5 and 1.5.
    """
    generator = np.random.default_rng(len(convention))

    def random(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if len(shape) == 2:
            return 2 * generator.normal(size=shape) / np.sqrt(shape[1])
        return generator.uniform(-0.5, 0.5, shape) if name.endswith("bias") else generator.uniform(0.5, 1.5, shape)

    tensors = {name: random(name, shape).astype(np.float32) for name, shape in _shapes(convention).items()}
    if convention == "deepseek_v3":
        tensors["model.layers.1.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(hf_fields(convention)))
    return tensors


def hf_fields(convention: str) -> dict[str, Any]:
    family, architecture, count = {
        "qwen3_next": ("qwen3", "Qwen3ForCausalLM", "mtp_num_hidden_layers"),
        "deepseek_v3": ("llama", "LlamaForCausalLM", "num_nextn_predict_layers"),
        "mimo": ("mimo", "MiMoForCausalLM", "num_nextn_predict_layers"),
    }[convention]
    fields: dict[str, Any] = dict(architectures=[architecture], model_type=family, hidden_act="silu", vocab_size=VOCAB)
    fields |= dict(hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=1, head_dim=SHAPE.head_dim)
    fields |= dict(num_attention_heads=SHAPE.heads, num_key_value_heads=SHAPE.kv_heads, torch_dtype="float32")
    fields |= dict(rms_norm_eps=SHAPE.eps, rope_theta=SHAPE.rope_theta, max_position_embeddings=64)
    return fields | {
        "attention_bias": convention == "mimo",
        "tie_word_embeddings": convention == "qwen3_next",
        count: 1,
    }

"""MTP heads in numpy, float64, one token at a time: each family as its own published code reads, and its checkpoints.

Weights carry the names and [out, in] layouts of the public checkpoints, a policy's and its head's in one dictionary.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.models.eagle3_reference import KeysValues, Shape, Weights, rms_norm, rotate

VOCAB, WIDTH, INNER = 17, 12, 16
SHAPE = Shape(heads=4, kv_heads=2, head_dim=6, rope_theta=50.0, eps=1e-3)
Step = Callable[[Weights, np.ndarray, np.ndarray, int, KeysValues], tuple[np.ndarray, np.ndarray]]


def block(w: Weights, prefix: str, x: np.ndarray, position: int, past: KeysValues) -> np.ndarray:
    """A pre-norm decoder layer with whatever q/k norms and biases the weights have."""
    s = SHAPE

    def project(name: str, x: np.ndarray) -> np.ndarray:
        return w[f"{prefix}{name}.weight"] @ x + w.get(f"{prefix}{name}.bias", 0.0)

    def heads(name: str, count: int) -> np.ndarray:
        rows = project(f"self_attn.{name}_proj", normed).reshape(count, s.head_dim)
        scale = w.get(f"{prefix}self_attn.{name}_norm.weight")
        return rows if scale is None else np.stack([rms_norm(row, scale, s.eps) for row in rows])

    normed = rms_norm(x, w[prefix + "input_layernorm.weight"], s.eps)
    q = rotate(heads("q", s.heads), position, s.rope_theta)
    past.keys.append(rotate(heads("k", s.kv_heads), position, s.rope_theta))
    past.values.append(heads("v", s.kv_heads))
    attended = []
    for head in range(s.heads):
        group = head * s.kv_heads // s.heads
        scores = np.array([q[head] @ key[group] for key in past.keys]) / np.sqrt(s.head_dim)
        weights = np.exp(scores - scores.max())
        attended.append(sum(a * value[group] for a, value in zip(weights / weights.sum(), past.values, strict=True)))
    x = x + project("self_attn.o_proj", np.concatenate(attended))
    normed = rms_norm(x, w[prefix + "post_attention_layernorm.weight"], s.eps)
    gate = project("mlp.gate_proj", normed)
    return x + project("mlp.down_proj", gate / (1 + np.exp(-gate)) * project("mlp.up_proj", normed))


def qwen3_next(
    w: Weights, hidden: np.ndarray, embedding: np.ndarray, position: int, past: KeysValues
) -> tuple[np.ndarray, np.ndarray]:
    """Logits, and the state after `mtp.norm`, which the next step reads. The policy's head is tied to its embedding."""
    e = rms_norm(embedding, w["mtp.pre_fc_norm_embedding.weight"], SHAPE.eps)
    h = rms_norm(hidden, w["mtp.pre_fc_norm_hidden.weight"], SHAPE.eps)
    x = block(w, "mtp.layers.0.", w["mtp.fc.weight"] @ np.concatenate([e, h]), position, past)
    normed = rms_norm(x, w["mtp.norm.weight"], SHAPE.eps)
    return w["model.embed_tokens.weight"] @ normed, normed


def deepseek_v3(
    w: Weights, hidden: np.ndarray, embedding: np.ndarray, position: int, past: KeysValues
) -> tuple[np.ndarray, np.ndarray]:
    """Logits by the layer's own head, and the residual stream before its norm."""
    layer = "model.layers.1."
    e = rms_norm(embedding if position else 0 * embedding, w[layer + "enorm.weight"], SHAPE.eps)
    h = rms_norm(hidden, w[layer + "hnorm.weight"], SHAPE.eps)
    x = block(w, layer, w[layer + "eh_proj.weight"] @ np.concatenate([e, h]), position, past)
    normed = rms_norm(x, w[layer + "shared_head.norm.weight"], SHAPE.eps)
    return w[layer + "shared_head.head.weight"] @ normed, x


def mimo(
    w: Weights, hidden: np.ndarray, embedding: np.ndarray, position: int, past: KeysValues
) -> tuple[np.ndarray, np.ndarray]:
    """Logits by the policy's head, and the state after `final_layernorm`; the hidden state comes first."""
    layer = "model.mtp_layers.0."
    e = rms_norm(embedding if position else 0 * embedding, w[layer + "token_layernorm.weight"], SHAPE.eps)
    h = rms_norm(hidden, w[layer + "hidden_layernorm.weight"], SHAPE.eps)
    x = block(w, layer, w[layer + "input_proj.weight"] @ np.concatenate([h, e]), position, past)
    normed = rms_norm(x, w[layer + "final_layernorm.weight"], SHAPE.eps)
    return w["lm_head.weight"] @ normed, normed


STEPS: dict[str, Step] = {"qwen3_next": qwen3_next, "deepseek_v3": deepseek_v3, "mimo": mimo}


def full_pass(
    step: Step, w: Weights, hidden: np.ndarray, tokens: np.ndarray, past: KeysValues
) -> tuple[np.ndarray, np.ndarray]:
    """Logits and fed-back states of positions 0 .. T - 1 from the policy's hidden [T, D] and the tokens 1 .. T."""
    table = w["model.embed_tokens.weight"]
    rows = [step(w, h, table[token], t, past) for t, (h, token) in enumerate(zip(hidden, tokens, strict=True))]
    return np.stack([logits for logits, _ in rows]), np.stack([state for _, state in rows])


def draft_logits(step: Step, w: Weights, hidden: np.ndarray, tokens: list[int], drafted: np.ndarray) -> np.ndarray:
    """The logits from which each of K tokens is drafted, [K, V], given the K - 1 tokens drafted before the last.

    tokens: the n + 1 committed ones, the pending one included. hidden: [n, D], of positions 0 .. n - 1.
    """
    past, table = KeysValues(), w["model.embed_tokens.weight"]
    logits, states = full_pass(step, w, hidden, np.array(tokens[1:]), past)
    rows, state = [logits[-1]], states[-1]
    for i, token in enumerate(drafted):
        row, state = step(w, state, table[token], len(hidden) + i, past)
        rows.append(row)
    return np.stack(rows)


def _block_shapes(prefix: str, qk_norm: bool, qkv_bias: bool) -> dict[str, tuple[int, ...]]:
    inner, outer = SHAPE.heads * SHAPE.head_dim, SHAPE.kv_heads * SHAPE.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (inner, WIDTH),
        "self_attn.k_proj.weight": (outer, WIDTH),
        "self_attn.v_proj.weight": (outer, WIDTH),
        "self_attn.o_proj.weight": (WIDTH, inner),
        "mlp.gate_proj.weight": (INNER, WIDTH),
        "mlp.up_proj.weight": (INNER, WIDTH),
        "mlp.down_proj.weight": (WIDTH, INNER),
        "input_layernorm.weight": (WIDTH,),
        "post_attention_layernorm.weight": (WIDTH,),
    }
    if qk_norm:
        shapes |= {f"self_attn.{name}_norm.weight": (SHAPE.head_dim,) for name in "qk"}
    if qkv_bias:
        shapes |= {f"self_attn.{name}_proj.bias": (inner if name == "q" else outer,) for name in "qkv"}
    return {prefix + name: shape for name, shape in shapes.items()}


def _shapes(convention: str) -> dict[str, tuple[int, ...]]:
    """Of a policy of one layer and its head."""
    options = dict(qk_norm=convention == "qwen3_next", qkv_bias=convention == "mimo")
    policy = {
        "model.embed_tokens.weight": (VOCAB, WIDTH),
        **_block_shapes("model.layers.0.", **options),
        "model.norm.weight": (WIDTH,),
    }
    if convention == "qwen3_next":
        names = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
        own, prefix = {}, "mtp.layers.0."
    elif convention == "deepseek_v3":
        prefix = "model.layers.1."
        names = tuple(prefix + name for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm"))
        own = {
            prefix + "shared_head.head.weight": (VOCAB, WIDTH),
            prefix + "embed_tokens.weight": (VOCAB, WIDTH),
            "lm_head.weight": (VOCAB, WIDTH),
        }
    else:
        prefix = "model.mtp_layers.0."
        names = tuple(prefix + x for x in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"))
        own = {"lm_head.weight": (VOCAB, WIDTH)}
    sizes = [(WIDTH,), (WIDTH,), (WIDTH, 2 * WIDTH), (WIDTH,)]
    around = {f"{name}.weight": size for name, size in zip(names, sizes, strict=True)}
    return {**policy, **around, **_block_shapes(prefix, **options), **own}


def write_checkpoint(directory: Path, convention: str) -> dict[str, np.ndarray]:
    """A policy with its head in Hugging Face layout: `qwen3_next` behind a tied Qwen3, `deepseek_v3` behind a Llama,
    `mimo` behind a MiMo. All weights are random, kernels large, norms anything from 0.5 to 1.5; returns them.
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
    return {
        "architectures": [architecture],
        "attention_bias": convention == "mimo",
        "head_dim": SHAPE.head_dim,
        "hidden_act": "silu",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "max_position_embeddings": 64,
        "model_type": family,
        "num_attention_heads": SHAPE.heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": SHAPE.kv_heads,
        count: 1,
        "rms_norm_eps": SHAPE.eps,
        "rope_theta": SHAPE.rope_theta,
        "tie_word_embeddings": convention == "qwen3_next",
        "torch_dtype": "float32",
        "vocab_size": VOCAB,
    }

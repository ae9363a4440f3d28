"""Independent implementation of EAGLE-3 in numpy, in float64 and one token at a time.

Weights have the names and [out, in] layouts of the public checkpoints.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

Weights = dict[str, np.ndarray]
# (hidden state, embedding of the next token, position, past) -> (draft logits, hidden state to feed back)
Step = Callable[[np.ndarray, np.ndarray, int, "Past"], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Shape:
    """Options that do not follow from the weights. Optional norms are applied if their weights exist."""

    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    eps: float
    norm_before_residual: bool = False
    norm_output: bool = False
    window: int | None = None


@dataclass
class KeysValues:
    """Keys and values of one layer up to now, one [kv_heads, head_dim] entry per position."""

    keys: list[np.ndarray] = field(default_factory=list)
    values: list[np.ndarray] = field(default_factory=list)


Past = defaultdict[int, KeysValues]


def rms_norm(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * scale


def rotate(x: np.ndarray, position: int, theta: float) -> np.ndarray:
    half = x.shape[-1] // 2
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * position * theta ** (-np.arange(half) / half))
    return np.concatenate([turned.real, turned.imag], axis=-1)


def fuse(w: Weights, s: Shape, features: np.ndarray) -> np.ndarray:
    if "fc.weight" not in w:
        return features
    if "input_norm.weight" in w:
        features = rms_norm(features, w["input_norm.weight"], s.eps)
    if "fc_norm.0.weight" in w:
        scales = [w[name] for name in sorted(w) if name.startswith("fc_norm.")]
        parts = np.split(features, len(scales))
        features = np.concatenate([rms_norm(part, scale, s.eps) for part, scale in zip(parts, scales, strict=True)])
    return w["fc.weight"] @ features


def attend(w: Weights, s: Shape, x: np.ndarray, position: int, past: KeysValues) -> np.ndarray:
    """Return the attention output of one position; append its keys and values to `past`."""
    q, k, v = (w[f"self_attn.{name}_proj.weight"] @ x + w.get(f"self_attn.{name}_proj.bias", 0.0) for name in "qkv")
    q, k, v = (heads.reshape(-1, s.head_dim) for heads in (q, k, v))
    if "self_attn.q_norm.weight" in w:
        q = rms_norm(q, w["self_attn.q_norm.weight"], s.eps)
        k = rms_norm(k, w["self_attn.k_norm.weight"], s.eps)
    past.keys.append(rotate(k, position, s.rope_theta))
    past.values.append(v)
    q = rotate(q, position, s.rope_theta)
    first = 0 if s.window is None else -s.window
    keys, values = past.keys[first:], past.values[first:]
    attended = []
    for head in range(s.heads):
        group = head // (s.heads // s.kv_heads)
        scores = np.array([q[head] @ key[group] for key in keys]) / np.sqrt(s.head_dim)
        weights = np.exp(scores - scores.max())
        attended.append(sum(a * value[group] for a, value in zip(weights / weights.sum(), values, strict=True)))
    return w["self_attn.o_proj.weight"] @ np.concatenate(attended)


def mlp(w: Weights, s: Shape, h: np.ndarray) -> np.ndarray:
    y = rms_norm(h, w["post_attention_layernorm.weight"], s.eps)
    gate, up = w["mlp.gate_proj.weight"] @ y, w["mlp.up_proj.weight"] @ y
    return w["mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)


def step(
    w: Weights, s: Shape, hidden: np.ndarray, embedding: np.ndarray, position: int, past: Past
) -> tuple[np.ndarray, np.ndarray]:
    """Return (draft logits, hidden to feed back) of one position. Appends its keys and values to `past`, by layer."""
    layers = by_layer(w)
    for i, own in enumerate(layers):
        if i == 0:
            e = rms_norm(embedding, own["input_layernorm.weight"], s.eps)
            h = rms_norm(hidden, own["hidden_norm.weight"], s.eps)
            x, residual = np.concatenate([e, h]), h if s.norm_before_residual else hidden
        else:
            x, residual = rms_norm(hidden, own["input_layernorm.weight"], s.eps), hidden
        hidden = residual + attend(own, s, x, position, past[i])
        hidden = hidden + mlp(own, s, hidden)
    normed = rms_norm(hidden, w["norm.weight"], s.eps)
    return w["lm_head.weight"] @ normed, normed if s.norm_output else hidden


def by_layer(w: Weights) -> list[Weights]:
    """Return the weights of each layer, by their names within it. SpecForge calls the only layer `midlayer`."""
    w = {name.replace("midlayer.", "layers.0."): x for name, x in w.items()}
    count = len({name.split(".")[1] for name in w if name.startswith("layers.")})
    prefixes = [f"layers.{i}." for i in range(count)]
    return [{name.removeprefix(p): x for name, x in w.items() if name.startswith(p)} for p in prefixes]


def full_pass(
    step: Step, hidden: np.ndarray, embeddings: np.ndarray, past: Past | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return logits and states of positions 0 .. T - 1.

    hidden: [T, D], what the head reads at these positions. embeddings: of tokens 1 .. T.
    """
    past = Past(KeysValues) if past is None else past
    rows = [step(h, e, t, past) for t, (h, e) in enumerate(zip(hidden, embeddings, strict=True))]
    return np.stack([logits for logits, _ in rows]), np.stack([state for _, state in rows])


def draft_logits(
    step: Step, hidden: np.ndarray, table: np.ndarray, tokens: Sequence[int], drafted: Sequence[int]
) -> np.ndarray:
    """Return the logits from which each of K tokens is drafted, [K, Vd], given the first K - 1 drafted tokens.

    tokens: the n + 1 committed tokens, including the pending one. hidden: [n, D], of positions 0 .. n - 1.
    """
    past = Past(KeysValues)
    logits, states = full_pass(step, hidden, table[np.array(tokens[1:])], past)
    rows, state = [logits[-1]], states[-1]
    for i, token in enumerate(drafted):
        row, state = step(state, table[token], len(hidden) + i, past)
        rows.append(row)
    return np.stack(rows)


def to_full_vocabulary(logits: np.ndarray, d2t: np.ndarray, size: int) -> np.ndarray:
    """Scatter from the draft vocabulary: target id = i + d2t[i], minus infinity elsewhere."""
    full = np.full((*logits.shape[:-1], size), -np.inf)
    full[..., np.arange(len(d2t)) + d2t] = logits
    return full

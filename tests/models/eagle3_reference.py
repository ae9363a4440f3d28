"""EAGLE-3 in numpy, float64, one token at a time: an independent reading of the published head.

Weights carry the names and [out, in] layouts of the public checkpoints.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

Weights = dict[str, np.ndarray]


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    eps: float


@dataclass
class KeysValues:
    """What the tokens so far left behind, one [kv_heads, head_dim] entry a position."""

    keys: list[np.ndarray] = field(default_factory=list)
    values: list[np.ndarray] = field(default_factory=list)

    def copy(self) -> "KeysValues":
        return KeysValues(list(self.keys), list(self.values))


def rms_norm(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x) + eps) * scale


def rotate(x: np.ndarray, position: int, theta: float) -> np.ndarray:
    half = x.shape[-1] // 2
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * position * theta ** (-np.arange(half) / half))
    return np.concatenate([turned.real, turned.imag], axis=-1)


def fuse(w: Weights, features: np.ndarray) -> np.ndarray:
    return w["fc.weight"] @ features


def midlayer(
    w: Weights, s: Shape, hidden: np.ndarray, embedding: np.ndarray, position: int, past: KeysValues
) -> tuple[np.ndarray, np.ndarray]:
    """(draft logits, hidden to feed back) of one position; appends its keys and values to `past`."""
    e = rms_norm(embedding, w["midlayer.input_layernorm.weight"], s.eps)
    h = rms_norm(hidden, w["midlayer.hidden_norm.weight"], s.eps)
    x = np.concatenate([e, h])

    q = (w["midlayer.self_attn.q_proj.weight"] @ x).reshape(s.heads, s.head_dim)
    k = (w["midlayer.self_attn.k_proj.weight"] @ x).reshape(s.kv_heads, s.head_dim)
    v = (w["midlayer.self_attn.v_proj.weight"] @ x).reshape(s.kv_heads, s.head_dim)
    past.keys.append(rotate(k, position, s.rope_theta))
    past.values.append(v)
    q = rotate(q, position, s.rope_theta)
    attended = []
    for head in range(s.heads):
        group = head // (s.heads // s.kv_heads)
        scores = np.array([q[head] @ key[group] for key in past.keys]) / np.sqrt(s.head_dim)
        weights = np.exp(scores - scores.max())
        attended.append(sum(a * value[group] for a, value in zip(weights / weights.sum(), past.values, strict=True)))
    h1 = hidden + w["midlayer.self_attn.o_proj.weight"] @ np.concatenate(attended)

    y = rms_norm(h1, w["midlayer.post_attention_layernorm.weight"], s.eps)
    gate, up = w["midlayer.mlp.gate_proj.weight"] @ y, w["midlayer.mlp.up_proj.weight"] @ y
    h2 = h1 + w["midlayer.mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)
    return w["lm_head.weight"] @ rms_norm(h2, w["norm.weight"], s.eps), h2


def full_pass(
    w: Weights, s: Shape, features: np.ndarray, embeddings: np.ndarray, past: KeysValues
) -> tuple[np.ndarray, np.ndarray]:
    """Logits and hidden of positions 0 .. T - 1 from features [T, F] and the embeddings of tokens 1 .. T."""
    rows = [midlayer(w, s, fuse(w, a), e, t, past) for t, (a, e) in enumerate(zip(features, embeddings, strict=True))]
    return np.stack([logits for logits, _ in rows]), np.stack([hidden for _, hidden in rows])


def draft_logits(
    w: Weights, s: Shape, features: np.ndarray, table: np.ndarray, tokens: Sequence[int], drafted: Sequence[int]
) -> np.ndarray:
    """The logits from which each of K tokens is drafted, [K, Vd], given the K - 1 tokens drafted before the last.

    tokens:   the n + 1 committed ones, the pending one included. features: [n, F], of positions 0 .. n - 1.
    """
    past = KeysValues()
    logits, hidden = full_pass(w, s, features, table[np.array(tokens[1:])], past)
    steps, state = [logits[-1]], hidden[-1]
    for i, token in enumerate(drafted):
        row, state = midlayer(w, s, state, table[token], len(features) + i, past)
        steps.append(row)
    return np.stack(steps)


def to_full_vocabulary(logits: np.ndarray, d2t: np.ndarray, size: int) -> np.ndarray:
    """Scatter from the draft vocabulary: target id = i + d2t[i], minus infinity elsewhere."""
    full = np.full((*logits.shape[:-1], size), -np.inf)
    full[..., np.arange(len(d2t)) + d2t] = logits
    return full

"""Independent implementation of block drafts in numpy, in float64, from the text of DFlash and DSpark.

Weights have the names and [out, in] layouts of the public checkpoints.
"""

from dataclasses import dataclass

import numpy as np

from tests.models.eagle3_reference import Weights, rms_norm, rotate


@dataclass(frozen=True)
class BlockShape:
    """Options that do not follow from the weights. windows: of each layer; None: all positions."""

    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    eps: float
    from_anchor: bool
    windows: tuple[int | None, ...]
    causal: bool = True


def block_logits(
    w: Weights,
    s: BlockShape,
    table: np.ndarray,
    head: np.ndarray,
    mask: np.ndarray,
    features: np.ndarray,
    first: int,
    anchor: int,
    previous: list[int],
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the logits [K, Vd] of the tokens after the anchor, and the confidence head's [K], None without one.

    The anchor stands right after the features [C, F].

    head:     the policy's vocabulary head, for a draft without its own.
    first:    position of the first feature.
    previous: the token before each drafted one, [K]; only the Markov head reads it.
    """
    count, at = len(previous), first + len(features)
    slots = count if s.from_anchor else count + 1
    context = [rms_norm(w["fc.weight"] @ each, w["hidden_norm.weight"], s.eps) for each in features]
    x = [table[anchor], *[mask] * (slots - 1)]
    for i, window in enumerate(s.windows):
        layer = {name.removeprefix(f"layers.{i}."): value for name, value in w.items() if f"layers.{i}." in name}
        normed = [rms_norm(each, layer["input_layernorm.weight"], s.eps) for each in x]
        places = [*range(first, at), *range(at, at + slots)]
        keys, values = [], []
        for position, read in zip(places, [*context, *normed], strict=True):
            k = (layer["self_attn.k_proj.weight"] @ read).reshape(s.kv_heads, s.head_dim)
            keys.append(rotate(rms_norm(k, layer["self_attn.k_norm.weight"], s.eps), position, s.rope_theta))
            values.append((layer["self_attn.v_proj.weight"] @ read).reshape(s.kv_heads, s.head_dim))
        after = []
        for j, (each, read) in enumerate(zip(x, normed, strict=True)):
            q = (layer["self_attn.q_proj.weight"] @ read).reshape(s.heads, s.head_dim)
            q = rotate(rms_norm(q, layer["self_attn.q_norm.weight"], s.eps), at + j, s.rope_theta)
            seen = [
                n
                for n, position in enumerate(places)
                if window is None
                or (position > at + j - window and (position < at or not s.causal or position <= at + j))
            ]
            attended = []
            for h in range(s.heads):
                group = h // (s.heads // s.kv_heads)
                scores = np.array([q[h] @ keys[n][group] for n in seen]) / np.sqrt(s.head_dim)
                weights = np.exp(scores - scores.max())
                attended.append(weights / weights.sum() @ np.array([values[n][group] for n in seen]))
            y = each + layer["self_attn.o_proj.weight"] @ np.concatenate(attended)
            z = rms_norm(y, layer["post_attention_layernorm.weight"], s.eps)
            gate, up = layer["mlp.gate_proj.weight"] @ z, layer["mlp.up_proj.weight"] @ z
            after.append(y + layer["mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up))
        x = after
    states = [rms_norm(each, w["norm.weight"], s.eps) for each in x[slots - count :]]
    logits = np.stack([w.get("lm_head.weight", head) @ state for state in states])
    if "markov_head.markov_w1.weight" in w:
        for k, token in enumerate(previous):
            logits[k] += w["markov_head.markov_w2.weight"] @ w["markov_head.markov_w1.weight"][token]
    if "confidence_head.proj.weight" not in w:
        return logits, None
    weight, read = w["confidence_head.proj.weight"][0], np.stack(states)
    if len(weight) > read.shape[1]:
        read = np.concatenate([read, w["markov_head.markov_w1.weight"][previous]], axis=1)
    return logits, read @ weight + w["confidence_head.proj.bias"]

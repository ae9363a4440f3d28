"""Shapes of published models by name, as their config.json gives them, and of their EAGLE-3 heads."""

from typing import Any

from models.config import DecoderConfig, ExpertsConfig, eagle3_feature_layers
from models.drafts.eagle3 import Eagle3Config, eagle3_like
from models.rope import Llama3Scaling


def _decoder(layers: int, hidden: int, mlp: int, heads: int, kv_heads: int, **other: Any) -> DecoderConfig:
    options: dict[str, Any] = dict(head_dim=128, qk_norm=True, rope_theta=1e6, vocab_size=151_936, max_positions=40_960)
    return DecoderConfig(
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_heads=heads,
        num_kv_heads=kv_heads,
        feature_layers=eagle3_feature_layers(layers),
        dtype="bfloat16",
        param_dtype="bfloat16",
        **options | other,
    )


def _experts(intermediate: int) -> ExpertsConfig:
    return ExpertsConfig(num_experts=128, active=8, intermediate_size=intermediate, norm_topk_prob=True)


DECODERS: dict[str, DecoderConfig] = {
    "qwen3-0.6b": _decoder(28, 1024, 3072, 16, 8, tie_embeddings=True),
    "qwen3-1.7b": _decoder(28, 2048, 6144, 16, 8, tie_embeddings=True),
    "qwen3-4b": _decoder(36, 2560, 9728, 32, 8, tie_embeddings=True),
    "qwen3-8b": _decoder(36, 4096, 12_288, 32, 8),
    "qwen3-14b": _decoder(40, 5120, 17_408, 40, 8),
    "qwen3-32b": _decoder(64, 5120, 25_600, 64, 8),
    "qwen3-30b-a3b": _decoder(48, 2048, 6144, 32, 4, experts=_experts(768)),
    "qwen3-235b-a22b": _decoder(94, 4096, 12_288, 64, 4, experts=_experts(1536)),
    "llama-3.1-8b": _decoder(
        32,
        4096,
        14_336,
        32,
        8,
        qk_norm=False,
        rope_theta=5e5,
        rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192),
        norm_eps=1e-5,
        vocab_size=128_256,
        max_positions=131_072,
    ),
}

# Width inside the MLP of the heads of SpecForge's configs, where it is not the policy's.
_HEAD_WIDTHS = {"qwen3-30b-a3b": 12_288, "qwen3-235b-a22b": 24_576}


def eagle3_config(name: str, draft_vocab_size: int = 32_000) -> Eagle3Config:
    """Return the EAGLE-3 head of a model of `DECODERS`, in the shape of SpecForge's configs."""
    policy = DECODERS[name]
    width = _HEAD_WIDTHS.get(name, policy.intermediate_size)
    return eagle3_like(policy, draft_vocab_size, intermediate_size=width)

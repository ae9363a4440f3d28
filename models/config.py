"""The shapes of the networks: what tells one family from another."""

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["float32", "bfloat16"]


def at_least_one(config: object, *names: str) -> None:
    """Raises ValueError for the first of these fields that is below 1."""
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} = {getattr(config, name)}: must be at least 1")


@dataclass(frozen=True)
class Llama3Scaling:
    """The rope scaling of Llama 3.1 and later: wavelengths beyond the original context are stretched by `factor`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One layer of rotary grouped-query attention and SwiGLU, as decoders and draft heads share it."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: bool = False
    qkv_bias: bool = False
    rope_theta: float = 10_000.0
    rope_scaling: Llama3Scaling | None = None
    norm_eps: float = 1e-6
    dtype: Dtype = "float32"
    param_dtype: Dtype = "float32"

    def __post_init__(self) -> None:
        at_least_one(self, "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads = {self.num_kv_heads}: must divide num_heads = {self.num_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim}: must be even")


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(LayerConfig):
    """A dense pre-norm decoder with RMSNorm.

    Qwen3 is `qk_norm`, Qwen2.5 is `qkv_bias`, Llama 3.x may carry `rope_scaling`. `feature_layers` are the layers on
    whose entry the residual stream is captured for the drafter (0-based, ascending); empty captures nothing.
    """

    vocab_size: int
    num_layers: int
    tie_embeddings: bool = False
    max_positions: int = 32_768
    feature_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(self, "vocab_size", "num_layers", "max_positions")
        ids = self.feature_layers
        if list(ids) != sorted(set(ids)) or any(not 0 <= i < self.num_layers for i in ids):
            raise ValueError(
                f"feature_layers = {ids}: must be distinct, ascending and within 0 .. {self.num_layers - 1}"
            )


def eagle3_feature_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers that EAGLE-3 (arXiv 2503.01840) reads, {2, L//2, L-3} on entry: distinct from 7 layers on.

    Raises ValueError below that, where the ids must be given.
    """
    if num_layers < 7:
        raise ValueError(f"num_layers = {num_layers}: below 7 layers feature_layers must be given")
    return 2, num_layers // 2, num_layers - 3

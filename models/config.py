"""Shapes and options of the networks, which distinguish the model families."""

from dataclasses import dataclass, fields
from typing import Any, Literal

from models.rope import RopeScaling

Dtype = Literal["float32", "bfloat16"]
# What the backward pass of training recomputes, layer by layer. none: nothing; dots: all but the products with weights
# (mainly the attention scores); full: everything.
Remat = Literal["none", "dots", "full"]


def at_least_one(config: object, *names: str) -> None:
    """Raise ValueError for the first of these fields that is below 1."""
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} = {getattr(config, name)}: must be at least 1")


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """One layer of rotary grouped-query attention and SwiGLU, shared by decoders and draft heads.

    Attributes:
        hidden_size: Width of the residual stream.
        intermediate_size: Width inside the SwiGLU.
        num_heads: Number of query heads, a multiple of `num_kv_heads`.
        num_kv_heads: Number of key and value heads.
        head_dim: Dimensions of each head, even.
        qk_norm: Whether queries and keys pass an RMSNorm.
        qkv_bias: Whether the q, k and v projections have a bias.
        rope_theta: Base of the rotary embedding.
        rope_scaling: How it is stretched to longer contexts; None for not at all.
        norm_eps: Epsilon of every RMSNorm.
        dtype: Compute dtype.
        param_dtype: Dtype of the parameters.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: bool = False
    qkv_bias: bool = False
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-6
    dtype: Dtype = "float32"
    param_dtype: Dtype = "float32"

    def __post_init__(self) -> None:
        at_least_one(self, "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads = {self.num_kv_heads}: must divide num_heads = {self.num_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim}: must be even")

    def layer_options(self) -> dict[str, Any]:
        """Return the fields of LayerConfig as keyword arguments, for the config of another network."""
        return {field.name: getattr(self, field.name) for field in fields(LayerConfig)}


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(LayerConfig):
    """Dense pre-norm decoder with RMSNorm.

    Qwen3 has `qk_norm`, Qwen2.5 has `qkv_bias`, Llama 3.x and Mistral have neither. Layers are counted from 0.

    Attributes:
        vocab_size: Number of tokens in the vocabulary.
        num_layers: Number of layers.
        tie_embeddings: Whether the vocabulary head is the transposed embedding.
        max_positions: Longest sequence that the model was made for.
        feature_layers: Layers on whose entry the residual stream is captured for the drafter, ascending. Empty captures
            nothing.
        sliding_window: Number of last positions, including its own, that a token attends to in `sliding_layers`. None
            for all positions.
        sliding_layers: Layers with the window, ascending; None for every layer.
    """

    vocab_size: int
    num_layers: int
    tie_embeddings: bool = False
    max_positions: int = 32_768
    feature_layers: tuple[int, ...] = ()
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(self, "vocab_size", "num_layers", "max_positions")
        for name in ("feature_layers", "sliding_layers"):
            ids = getattr(self, name) or ()
            if list(ids) != sorted(set(ids)) or any(not 0 <= i < self.num_layers for i in ids):
                raise ValueError(f"{name} = {ids}: must be distinct, ascending and within 0 .. {self.num_layers - 1}")
        if self.sliding_window is not None:
            at_least_one(self, "sliding_window")
        elif self.sliding_layers is not None:
            raise ValueError(f"sliding_layers = {self.sliding_layers}: must be none without sliding_window")

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Return the window of each layer, None for a layer that attends to all positions."""
        sliding = range(self.num_layers) if self.sliding_layers is None else self.sliding_layers
        return tuple(self.sliding_window if i in sliding else None for i in range(self.num_layers))


def eagle3_feature_layers(num_layers: int) -> tuple[int, int, int]:
    """Return the layers whose inputs EAGLE-3 (arXiv 2503.01840) reads by default: 2, L // 2 and L - 3.

    Raises ValueError below 7 layers, where these are not distinct and ascending.
    """
    if num_layers < 7:
        raise ValueError(f"num_layers = {num_layers}: below 7 layers feature_layers must be given")
    return 2, num_layers // 2, num_layers - 3

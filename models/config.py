"""The shapes of the networks: what tells one family from another."""

from dataclasses import dataclass, fields
from typing import Any, Literal

from models.rope import RopeScaling

Dtype = Literal["float32", "bfloat16"]
# What the backward pass of a training forward computes again, a layer at a time: nothing; all but the products with
# weights, attention's scores above all; or everything.
Remat = Literal["none", "dots", "full"]


def at_least_one(config: object, *names: str) -> None:
    """Raises ValueError for the first of these fields that is below 1."""
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} = {getattr(config, name)}: must be at least 1")


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
        """Return the fields that every network of such layers has, as keyword arguments for another one's config."""
        return {field.name: getattr(self, field.name) for field in fields(LayerConfig)}


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(LayerConfig):
    """A dense pre-norm decoder with RMSNorm.

    Qwen3 is `qk_norm`, Qwen2.5 is `qkv_bias`, Llama 3.x and Mistral have neither. Layers are counted from 0.

    feature_layers: on whose entry the residual stream is captured for the drafter, ascending; empty captures nothing.
    sliding_window: how many of the last positions, its own included, a token attends to in `sliding_layers`; None for
                    all.
    sliding_layers: those that have the window, ascending; None for every layer.
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
        """The window of each layer; None where it attends to all positions."""
        within = range(self.num_layers) if self.sliding_layers is None else self.sliding_layers
        return tuple(self.sliding_window if i in within else None for i in range(self.num_layers))


def eagle3_feature_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers that EAGLE-3 (arXiv 2503.01840) reads, {2, L//2, L-3} on entry: distinct from 7 layers on.

    Raises ValueError below that, where the ids must be given.
    """
    if num_layers < 7:
        raise ValueError(f"num_layers = {num_layers}: below 7 layers feature_layers must be given")
    return 2, num_layers // 2, num_layers - 3

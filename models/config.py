"""Shapes and options of the networks, which distinguish the model families."""

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from models.rope import RopeScaling
from specjax.options import MOST, Experts, Layers, NonNegative, Options, Positive, above, at_least, at_most

Dtype = Literal["float32", "bfloat16"]
# What the backward pass of training recomputes, layer by layer. none: nothing; dots: all but the products with weights
# (mainly the attention scores); full: everything.
Remat = Literal["none", "dots", "full"]


# At base 1 every pair of dimensions turns alike, and YaRN divides by the logarithm of the base.
RopeTheta = Annotated[float, above(1), at_most(1e15)]
# Below the bound the squares of float32 that it is added to have no digits left.
NormEps = Annotated[float, at_least(1e-20), at_most(1)]
HeadDim = Annotated[int, at_least(2), at_most(4096)]
# One position holds a prompt of one token and no answer.
MaxPositions = Annotated[int, at_least(2), at_most(MOST)]


@dataclass(frozen=True, kw_only=True)
class LayerConfig(Options):
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

    hidden_size: Positive
    intermediate_size: Positive
    num_heads: Positive
    num_kv_heads: Positive
    head_dim: HeadDim
    qk_norm: bool = False
    qkv_bias: bool = False
    rope_theta: RopeTheta = 10_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: NormEps = 1e-6
    dtype: Dtype = "float32"
    param_dtype: Dtype = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads = {self.num_kv_heads}: must divide num_heads = {self.num_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim}: must be even")

    def layer_options(self) -> dict[str, Any]:
        """Return the fields of LayerConfig as keyword arguments, for the config of another network."""
        return {field.name: getattr(self, field.name) for field in fields(LayerConfig)}


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(Options):
    """Mixture of experts in place of the MLP: each token is the input of the experts that the router gives most weight.

    Attributes:
        num_experts: Number of experts in a layer.
        active: Number of experts of a token (`num_experts_per_tok`).
        intermediate_size: Width inside an expert.
        norm_topk_prob: Whether the weights of a token's experts are divided by their sum.
        layers: Layers with experts, ascending; None for every layer.
    """

    num_experts: Experts
    active: Experts
    intermediate_size: Positive
    norm_topk_prob: bool = False
    layers: tuple[NonNegative, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.active > self.num_experts:
            raise ValueError(f"active = {self.active}: must be at most num_experts = {self.num_experts}")
        if self.layers == ():
            raise ValueError(
                "layers = (): must name at least one layer; for a decoder without experts set experts = None"
            )


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(LayerConfig):
    """Pre-norm decoder with RMSNorm.

    Qwen3 has `qk_norm`, Qwen2.5 has `qkv_bias`, Llama 3.x and Mistral have neither. Qwen3-MoE is Qwen3 with `experts`.
    Layers are counted from 0.

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
        experts: Mixture of experts in place of the MLP of some layers or all; None: only dense layers.
    """

    vocab_size: Positive
    num_layers: Layers
    tie_embeddings: bool = False
    max_positions: MaxPositions = 32_768
    feature_layers: tuple[NonNegative, ...] = ()
    sliding_window: Positive | None = None
    sliding_layers: tuple[NonNegative, ...] | None = None
    experts: ExpertsConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        layer_lists = {"feature_layers": self.feature_layers, "sliding_layers": self.sliding_layers}
        if self.experts is not None:
            layer_lists["experts.layers"] = self.experts.layers
        for name, layers in layer_lists.items():
            ids = layers or ()
            if list(ids) != sorted(set(ids)) or any(not 0 <= i < self.num_layers for i in ids):
                raise ValueError(f"{name} = {ids}: must be distinct, ascending and within 0 .. {self.num_layers - 1}")
        if self.sliding_window is None and self.sliding_layers is not None:
            raise ValueError(f"sliding_layers = {self.sliding_layers}: must be none without sliding_window")

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Return the window of each layer, None for a layer that attends to all positions."""
        sliding = range(self.num_layers) if self.sliding_layers is None else self.sliding_layers
        return tuple(self.sliding_window if i in sliding else None for i in range(self.num_layers))

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Return the layers with a mixture of experts."""
        if self.experts is None:
            return ()
        return tuple(range(self.num_layers)) if self.experts.layers is None else self.experts.layers


def eagle3_feature_layers(num_layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs EAGLE-3 (arXiv 2503.01840) reads by default: 2, L // 2 and L - 3.

    Below 7 layers these are not distinct and ascending: 1, L // 2 and L - 1, or all layers of a policy of up to 3.
    """
    if num_layers < 4:
        return tuple(range(num_layers))
    return (2, num_layers // 2, num_layers - 3) if num_layers >= 7 else (1, num_layers // 2, num_layers - 1)


def block_feature_layers(num_layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs a block draft reads by default, as DFlash (arXiv 2602.06036): five, evenly spread.

    Each is the layer after one of those whose outputs DFlash counts. Below 8 layers, where these are not distinct, the
    last five, or as many as there are.
    """
    if num_layers < 8:
        return tuple(range(max(num_layers - 5, 0), num_layers))
    return tuple(1 + round(1 + i * (num_layers - 4) / 4) for i in range(5))

"""Families of decoders that Hugging Face's `model_type` names."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Family:
    """Properties of a `model_type` beyond the fields of its `config.json`.

    Attributes:
        architecture: The only value allowed in `architectures`.
        qk_norm: Queries and keys pass an RMSNorm.
        qkv_bias: The q, k and v projections have a bias.
        attention_bias: Allowed values of the field of this name. MiMo's own code writes the field but ignores it.
        windows: Layers with a sliding window. none: no layer; any: any layers, if `use_sliding_window` is true; each:
            every layer, unless `sliding_window` is null.
        experts: Layers have a mixture of experts in place of an MLP.
    """

    architecture: str
    qk_norm: bool = False
    qkv_bias: bool = False
    attention_bias: tuple[bool, ...] = (False,)
    windows: Literal["none", "any", "each"] = "none"
    experts: bool = False


FAMILIES = {
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True, windows="any"),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", qk_norm=True, experts=True),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, windows="any"),
    "llama": Family("LlamaForCausalLM"),
    "mimo": Family("MiMoForCausalLM", qkv_bias=True, attention_bias=(False, True), windows="any"),
    "mistral": Family("MistralForCausalLM", windows="each"),
}

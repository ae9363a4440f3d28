"""The families of decoders that Hugging Face's `model_type` names."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Family:
    """Conventions that a `model_type` stands for beyond its fields.

    attention_bias: the allowed values of the field of this name; MiMo's own code writes it and does not read it.
    windows:        no layer attends to a sliding window; any may, where `use_sliding_window` says so; or each does, of
                    `sliding_window` unless that is null.
    """

    architecture: str
    qk_norm: bool = False
    qkv_bias: bool = False
    attention_bias: tuple[bool, ...] = (False,)
    windows: Literal["none", "any", "each"] = "none"


FAMILIES = {
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True, windows="any"),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, windows="any"),
    "llama": Family("LlamaForCausalLM"),
    "mimo": Family("MiMoForCausalLM", qkv_bias=True, attention_bias=(False, True), windows="any"),
    "mistral": Family("MistralForCausalLM", windows="each"),
}

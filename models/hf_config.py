"""Hugging Face's `config.json` to and from `DecoderConfig`, as transformers 4 and 5 write it.

Every field is read, checked against the values that the decoder implements, known to leave the forward alone, or
refused: nothing is dropped in silence.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from models.config import DecoderConfig, Llama3Scaling, eagle3_feature_layers
from models.files import errors_name, read_json


@dataclass(frozen=True)
class Family:
    """What `model_type` stands for beyond its fields."""

    architecture: str
    qk_norm: bool = False
    qkv_bias: bool = False


FAMILIES = {
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True),
    "llama": Family("LlamaForCausalLM"),
}

# Only these values are implemented.
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "attention_bias": (False,),
    "attention_dropout": (0,),
    "chunk_size_feed_forward": (0,),
    "hidden_act": ("silu",),
    "is_encoder_decoder": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (None, 1),
    "pruned_heads": (None, {}),
    "quantization_config": (None,),
    "use_sliding_window": (False,),
}
_READ = frozenset({
    "architectures", "dtype", "head_dim", "hidden_size", "intermediate_size", "layer_types", "max_position_embeddings",
    "model_type", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "rope_parameters",
    "rope_scaling", "rope_theta", "tie_word_embeddings", "torch_dtype", "vocab_size",
})  # fmt: skip
# Token ids, training and generation settings, book-keeping: none of them can change the forward. (Qwen's sliding
# window is off unless `use_sliding_window` says otherwise, and `pretraining_tp` only splits matrix products.)
_CARRIED = frozenset({
    "_attn_implementation_autoset", "_name_or_path", "bos_token_id", "decoder_start_token_id", "do_sample",
    "eos_token_id", "finetuning_task", "id2label", "initializer_range", "is_decoder", "label2id", "max_length",
    "max_window_layers", "output_attentions", "output_hidden_states", "pad_token_id", "prefix", "pretraining_tp",
    "problem_type", "repetition_penalty", "return_dict", "sep_token_id", "sliding_window", "task_specific_params",
    "temperature", "tokenizer_class", "top_k", "top_p", "torchscript", "transformers_version", "unsloth_fixed",
    "unsloth_version", "use_bfloat16", "use_cache",
})  # fmt: skip


def read_hf_config(directory: Path, feature_layers: tuple[int, ...] | None = None) -> DecoderConfig:
    """The policy that DIRECTORY/config.json describes; `config_from_hf` says how. Errors name the file."""
    path = directory / "config.json"
    fields = read_json(path)
    with errors_name(path):
        return config_from_hf(fields, feature_layers)


def config_from_hf(fields: Mapping[str, Any], feature_layers: tuple[int, ...] | None = None) -> DecoderConfig:
    """The decoder that the fields of a `config.json` describe.

    Args:
        fields: of model_type qwen3, qwen2 or llama, written by transformers 4 or 5.
        feature_layers: what the drafter reads, `eagle3_feature_layers` by default.

    Compute and parameter dtype are both the file's. Raises ValueError with one line naming the field, its value and
    what is allowed: for a missing field, a value that is not implemented, an unknown field.
    """
    family = FAMILIES[_one_of(fields, "model_type", tuple(FAMILIES))]
    for name, expected in (("architectures", family.architecture), ("layer_types", "full_attention")):
        for value in fields.get(name) or ():
            _check(name, value, (expected,))
    for name, allowed in _ALLOWED.items():
        if name in fields:
            _check(name, fields[name], allowed)
    if unknown := sorted(set(fields) - _READ - _CARRIED - set(_ALLOWED)):
        name = unknown[0]
        raise ValueError(f"{name} = {_show(fields[name])}: unknown field, refused because it may change the forward")
    num_layers, num_heads = _integer(fields, "num_hidden_layers"), _integer(fields, "num_attention_heads")
    hidden_size = _integer(fields, "hidden_size")
    theta, scaling = _rope(fields)
    dtype_name, dtype = _either(fields, "dtype", "torch_dtype")
    dtype = "float32" if dtype is None else dtype
    _check(dtype_name, dtype, ("float32", "bfloat16"))
    return DecoderConfig(
        vocab_size=_integer(fields, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_integer(fields, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_integer(fields, "num_key_value_heads", default=num_heads),
        head_dim=_integer(fields, "head_dim", default=hidden_size // num_heads),
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias,
        tie_embeddings=_one_of({"tie_word_embeddings": False, **fields}, "tie_word_embeddings", (False, True)),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=_number(fields, "rms_norm_eps"),
        max_positions=_integer(fields, "max_position_embeddings"),
        feature_layers=eagle3_feature_layers(num_layers) if feature_layers is None else feature_layers,
        dtype=dtype,
        param_dtype=dtype,
    )


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The fields of a `config.json` that describes the decoder, in the words of transformers 4, which 5 reads too.

    Raises ValueError where no family has this combination of q/k norm and qkv bias.
    """
    wanted = config.qk_norm, config.qkv_bias
    matches = [name for name, family in FAMILIES.items() if (family.qk_norm, family.qkv_bias) == wanted]
    if not matches:
        raise ValueError(f"qk_norm = {config.qk_norm}, qkv_bias = {config.qkv_bias}: no supported family has both")
    scaling = config.rope_scaling
    return {
        "architectures": [FAMILIES[matches[0]].architecture],
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_positions,
        "model_type": matches[0],
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.norm_eps,
        "rope_scaling": None if scaling is None else {"rope_type": "llama3", **asdict(scaling)},
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": config.param_dtype,
        "vocab_size": config.vocab_size,
    }


def carried_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `config.json` that leave the forward alone, token ids and the like: what an export hands on."""
    return {name: value for name, value in fields.items() if name in _CARRIED and name != "transformers_version"}


def _rope(fields: Mapping[str, Any]) -> tuple[float, Llama3Scaling | None]:
    """The base and the scaling; transformers 5 keeps both in one object, 4 kept the base outside."""
    outer, rope = _either(fields, "rope_parameters", "rope_scaling")
    rope = {} if rope is None else rope
    if not isinstance(rope, dict):
        raise ValueError(f"{outer} = {_show(rope)}: must be an object")
    inner = {f"{outer}.{key}": value for key, value in rope.items()}
    theta_name, theta = _either({**fields, **inner}, f"{outer}.rope_theta", "rope_theta")
    theta = 10_000.0 if theta is None else _number({theta_name: theta}, theta_name)
    kind_name, kind = _either(inner, f"{outer}.rope_type", f"{outer}.type")
    _check(kind_name, "default" if kind is None else kind, ("default", "llama3"))
    _check(f"{outer}.partial_rotary_factor", rope.get("partial_rotary_factor"), _ALLOWED["partial_rotary_factor"])
    reals, length = ("factor", "low_freq_factor", "high_freq_factor"), "original_max_position_embeddings"
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    known |= {*reals, length} if kind == "llama3" else set()
    if unknown := sorted(set(rope) - known):
        name = f"{outer}.{unknown[0]}"
        raise ValueError(f"{name} = {_show(inner[name])}: unknown field, refused because it may change the forward")
    if kind != "llama3":
        return theta, None
    factor, low, high = (_number(inner, f"{outer}.{key}") for key in reals)
    if high <= low:
        raise ValueError(f"{outer}.high_freq_factor = {high}: must be above {outer}.low_freq_factor = {low}")
    return theta, Llama3Scaling(factor, low, high, _integer(inner, f"{outer}.{length}"))


def _either(fields: Mapping[str, Any], one: str, other: str) -> tuple[str, Any]:
    """The name and value of whichever of two fields is there; where both are, they must agree."""
    a, b = fields.get(one), fields.get(other)
    if a is not None and b is not None and a != b:
        raise ValueError(f"{one} = {_show(a)}: contradicts {other} = {_show(b)}")
    return (one, a) if a is not None else (other, b)


def _check(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    # JSON's true equals 1 in Python.
    if not any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in allowed):
        raise ValueError(f"{name} = {_show(value)}: must be {' or '.join(map(_show, allowed))}")


def _one_of(fields: Mapping[str, Any], name: str, allowed: tuple[Any, ...]) -> Any:
    if name not in fields:
        raise ValueError(f"{name}: missing, must be {' or '.join(map(_show, allowed))}")
    _check(name, fields[name], allowed)
    return fields[name]


def _integer(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = fields.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"{name} = {_show(value)}: must be a positive integer")
    return value


def _number(fields: Mapping[str, Any], name: str) -> float:
    value = fields.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{name} = {_show(value)}: must be a positive number")
    return float(value)


def _show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."

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
from models.mtp_layout import COUNTS


@dataclass(frozen=True)
class Family:
    """What `model_type` stands for beyond its fields.

    attention_bias: the allowed values of the field of this name; MiMo's own code writes it and does not read it.
    """

    architecture: str
    qk_norm: bool = False
    qkv_bias: bool = False
    attention_bias: tuple[bool, ...] = (False,)


FAMILIES = {
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True),
    "llama": Family("LlamaForCausalLM"),
    "mimo": Family("MiMoForCausalLM", qkv_bias=True, attention_bias=(False, True)),
}

# What the decoder does not have, by the model_type or the field that tells: a better reason than an unknown name.
_FOREIGN = {name: "gated attention and zero-centred norms" for name in ("qwen3_next", "qwen3_5", "qwen3_5_text")}
_BLOCKS = {
    "kv_lora_rank": "multi-head latent attention",
    "n_routed_experts": "a mixture of experts",
    "num_experts": "a mixture of experts",
    "num_local_experts": "a mixture of experts",
    "attn_output_gate": "gated attention",
    "full_attention_interval": "linear attention",
}

# Only these values are implemented.
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "attention_dropout": (0,),
    "chunk_size_feed_forward": (0,),
    "hidden_act": ("silu",),
    "is_encoder_decoder": (False,),
    "mlp_bias": (False,),
    "mtp_use_dedicated_embeddings": (False,),
    "partial_rotary_factor": (None, 1),
    "pruned_heads": (None, {}),
    "quantization_config": (None,),
    "use_sliding_window": (False,),
}
_READ = frozenset({
    "architectures", "attention_bias", "dtype", "head_dim", "hidden_size", "intermediate_size", "layer_types",
    "max_position_embeddings", "model_type", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
    "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "tie_word_embeddings", "torch_dtype", "vocab_size",
})  # fmt: skip
# Of an MTP head, which models.mtp_files reads and an export writes anew; and of code that no export brings along.
_ELSEWHERE = frozenset({"auto_map", *COUNTS})
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
        fields: of model_type qwen3, qwen2, llama or mimo, written by transformers 4 or 5.
        feature_layers: what the drafter reads, `eagle3_feature_layers` by default.

    Compute and parameter dtype are both the file's. Raises ValueError with one line naming the field, its value and
    what is allowed: for a missing field, a value that is not implemented, an unknown field.
    """
    _refuse_foreign(fields)
    family = FAMILIES[_one_of(fields, "model_type", tuple(FAMILIES))]
    if "attention_bias" in fields:
        _check("attention_bias", fields["attention_bias"], family.attention_bias)
    for name, expected in (("architectures", family.architecture), ("layer_types", "full_attention")):
        for value in fields.get(name) or ():
            _check(name, value, (expected,))
    for name, allowed in _ALLOWED.items():
        if name in fields:
            _check(name, fields[name], allowed)
    if unknown := sorted(set(fields) - _READ - _CARRIED - _ELSEWHERE - set(_ALLOWED)):
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


def config_to_hf(config: DecoderConfig, preferred: str | None = None) -> dict[str, Any]:
    """The fields of a `config.json` that describes the decoder, in the words of transformers 4, which 5 reads too.

    preferred: the model_type to write where it has this kind of block; by default the most common that has.

    Raises ValueError where no family has this combination of q/k norm and qkv bias.
    """
    wanted = config.qk_norm, config.qkv_bias
    matches = [name for name, family in FAMILIES.items() if (family.qk_norm, family.qkv_bias) == wanted]
    if not matches:
        raise ValueError(f"qk_norm = {config.qk_norm}, qkv_bias = {config.qkv_bias}: no supported family has both")
    model_type = preferred if preferred in matches else matches[0]
    scaling = config.rope_scaling
    return {
        "architectures": [FAMILIES[model_type].architecture],
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_positions,
        "model_type": model_type,
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


def _refuse_foreign(fields: Mapping[str, Any]) -> None:
    if lacking := _FOREIGN.get(fields.get("model_type", "")):
        raise ValueError(f'model_type = "{fields["model_type"]}": {lacking} are not implemented')
    for name, block in _BLOCKS.items():
        if fields.get(name):
            raise ValueError(f"{name} = {_show(fields[name])}: {block} is not implemented")


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

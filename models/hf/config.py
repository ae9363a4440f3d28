"""Conversion between Hugging Face's `config.json`, as transformers 4 and 5 write it, and `DecoderConfig`.

No field is dropped silently. Each is read, checked against the values that the decoder implements, known not to affect
the forward, or refused.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.config import DecoderConfig, eagle3_feature_layers
from models.files import errors_name, read_json
from models.hf.experts import EXPERT_FIELDS, experts_from_hf, experts_to_hf
from models.hf.families import FAMILIES
from models.hf.mtp_layout import COUNTS
from models.hf.rope import ROPE_FIELDS, rope_from_hf, rope_to_hf
from models.hf.windows import has_windows, windows_from_hf, windows_to_hf
from models.json_fields import boolean, check, either, integer, number, one_of, refuse_unknown, texts

# Positive integers: our name to Hugging Face's.
_SIZES = {
    "head_dim": "head_dim",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "num_layers": "num_hidden_layers",
    "vocab_size": "vocab_size",
}
# Fields of which only these values are implemented.
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
    "rope_interleaved": (False,),
    "use_mrope": (False,),
}
_READ_FIELDS = frozenset({
    "architectures", "attention_bias", "dtype", "layer_types", "model_type", "rms_norm_eps", "tie_word_embeddings",
    "torch_dtype", "use_sliding_window", *_SIZES.values(), *ROPE_FIELDS,
})  # fmt: skip
# COUNTS are read by models.hf.drafts.mtp and written by models.hf.save. auto_map names code, which no export copies.
_ELSEWHERE = frozenset({"auto_map", *COUNTS})
# Token ids, training and generation settings, book-keeping: none of them changes the forward. `pretraining_tp` only
# splits matrix products. `sliding_window` has no effect if windows are off; if they are on, an export writes its own.
_CARRIED = frozenset({
    "_attn_implementation_autoset", "_model_name_or_path", "_name_or_path", "bos_token_id", "decoder_start_token_id",
    "do_sample", "eos_token_id", "finetuning_task", "id2label", "initializer_range", "is_decoder", "is_llama_config",
    "label2id", "max_length", "max_window_layers", "output_attentions", "output_hidden_states", "output_router_logits",
    "pad_token_id", "prefix", "pretraining_tp", "problem_type", "repetition_penalty", "return_dict",
    "router_aux_loss_coef", "sep_token_id", "sliding_window", "task_specific_params", "temperature", "tokenizer_class",
    "top_k", "top_p", "torchscript", "transformers.js_config",
    "transformers_version", "unk_token_id", "unsloth_fixed", "unsloth_version", "use_bfloat16", "use_cache",
})  # fmt: skip


def read_hf_config(directory: Path, feature_layers: tuple[int, ...] | None = None) -> DecoderConfig:
    """Read DIRECTORY/config.json with `config_from_hf`. Errors name the file."""
    path = directory / "config.json"
    fields = read_json(path)
    refuse_earlier_layout(directory, fields)
    with errors_name(path):
        return config_from_hf(fields, feature_layers)


def refuse_earlier_layout(directory: Path, fields: Mapping[str, Any]) -> None:
    """Raise ValueError if the directory holds a policy in the Orbax layout of earlier versions.

    fields: of its `config.json`, which had our names.
    """
    if "num_layers" in fields and (directory / "params").is_dir():
        raise ValueError(f"{directory}: written by an earlier version; convert it with that version's launch.convert")


def config_from_hf(fields: Mapping[str, Any], feature_layers: tuple[int, ...] | None = None) -> DecoderConfig:
    """Return the decoder that the fields of a `config.json` describe.

    The compute and parameter dtypes are both the file's; float32 for float16, in which nothing computes.

    Args:
        fields: of model_type qwen3, qwen3_moe, qwen2, llama, mimo or mistral, written by transformers 4 or 5.
        feature_layers: layers that the drafter reads, by default `eagle3_feature_layers`.

    Raises a one-line ValueError with the field, its value and what is allowed: for a missing field, a value that is not
    implemented, or an unknown field.
    """
    family = FAMILIES[one_of(fields, "model_type", tuple(FAMILIES))]
    if "attention_bias" in fields:
        check("attention_bias", fields["attention_bias"], family.attention_bias)
    for value in texts(fields, "architectures"):
        check("architectures", value, (family.architecture,))
    for name, allowed in _ALLOWED.items():
        if name in fields:
            check(name, fields[name], allowed)
    of_family = EXPERT_FIELDS if family.experts else frozenset()
    refuse_unknown(fields, _READ_FIELDS | _CARRIED | _ELSEWHERE | of_family | set(_ALLOWED))
    heads = integer(fields, "num_attention_heads")
    defaults = {"num_kv_heads": heads, "head_dim": integer(fields, "hidden_size") // heads}
    sizes = {ours: integer(fields, theirs, defaults.get(ours)) for ours, theirs in _SIZES.items()}
    theta, scaling = rope_from_hf(fields)
    window, sliding_layers = windows_from_hf(fields, family, sizes["num_layers"])
    dtype_name, dtype = either(fields, "dtype", "torch_dtype")
    dtype = "float32" if dtype is None else dtype
    check(dtype_name, dtype, ("float32", "bfloat16", "float16"))
    dtype = "float32" if dtype == "float16" else dtype
    return DecoderConfig(
        **sizes,
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias,
        tie_embeddings=boolean(fields, "tie_word_embeddings"),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=number(fields, "rms_norm_eps"),
        feature_layers=eagle3_feature_layers(sizes["num_layers"]) if feature_layers is None else feature_layers,
        sliding_window=window,
        sliding_layers=sliding_layers,
        experts=experts_from_hf(fields, sizes["num_layers"]) if family.experts else None,
        dtype=dtype,
        param_dtype=dtype,
    )


def config_to_hf(config: DecoderConfig, preferred: str | None = None) -> dict[str, Any]:
    """Return the fields of a `config.json` for the decoder, in the format of transformers 4, which 5 reads too.

    preferred: model_type to write if it has this kind of block; otherwise the first of FAMILIES that has.

    Raises ValueError if no family has this combination of q/k norm, qkv bias, experts and sliding windows.
    """
    block = config.qk_norm, config.qkv_bias, config.experts is not None
    alike = {name: kind for name, kind in FAMILIES.items() if (kind.qk_norm, kind.qkv_bias, kind.experts) == block}
    if not alike:
        which = "this with experts" if config.experts else "both"
        raise ValueError(f"qk_norm = {config.qk_norm}, qkv_bias = {config.qkv_bias}: no supported family has {which}")
    matches = [name for name, family in alike.items() if has_windows(family, config)]
    if not matches:
        raise ValueError(
            f"sliding_layers = {config.sliding_layers}: must be all layers or none for {' and '.join(alike)}"
        )
    model_type = preferred if preferred in matches else matches[0]
    return {
        "architectures": [FAMILIES[model_type].architecture],
        "hidden_act": "silu",
        "model_type": model_type,
        "rms_norm_eps": config.norm_eps,
        **rope_to_hf(config.rope_theta, config.rope_scaling),
        **windows_to_hf(FAMILIES[model_type], config),
        **experts_to_hf(config),
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": config.param_dtype,
        **{theirs: getattr(config, ours) for ours, theirs in _SIZES.items()},
    }


def carried_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `config.json` that do not affect the forward, such as token ids. Exports copy them."""
    return {name: value for name, value in fields.items() if name in _CARRIED and name != "transformers_version"}

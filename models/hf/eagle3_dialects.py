"""The `config.json` of EAGLE-3 heads in two public dialects.

`specforge` is used by SafeAILab's EAGLE and by SpecForge, `speculators` by vLLM's library of this name.
They number the policy's layers differently. We read the residual stream on entry to layer i. speculators calls it i
too; SpecForge calls it i - 1, the layer whose output it is.
"""

from collections.abc import Mapping
from typing import Any, Literal

from models.config import DecoderConfig
from models.drafts.eagle3 import Eagle3Config
from models.hf.config import config_from_hf, config_to_hf
from models.hf.families import FAMILIES
from models.json_fields import boolean, check, either, integer, layer_ids, nested, one_of, refuse_unknown, show, texts

# Block drafts have zlab and deepspec in place of specforge.
Dialect = Literal["specforge", "speculators", "zlab", "deepspec"]

_FLAGS = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_VOCABULARY = ("draft_vocab_size", "target_hidden_size")
_READ_FIELDS = frozenset({
    "architectures", "speculators_config", "speculators_model_type", "transformer_layer_config", _LAYERS, *_FLAGS,
    *_VOCABULARY,
})  # fmt: skip
# Fields that do not affect the forward: book-keeping of speculators, and how a copy of the embedding was trained.
_CARRIED = frozenset({
    "_name_or_path", "auto_map", "dtype", "embed_requires_grad", "enable_sp_ulysses", "has_no_defaults_at_init",
    "model_type", "return_dict", "speculators_version", "tie_word_embeddings", "torch_dtype", "transformers_version",
})  # fmt: skip


def dialect_of(fields: Mapping[str, Any]) -> Dialect | None:
    """Return the dialect of a `config.json`, None if it does not describe a draft."""
    if "speculators_model_type" in fields:
        return "speculators"
    eagle = any(name.endswith("Eagle3") for name in texts(fields, "architectures"))
    return "specforge" if eagle or "draft_vocab_size" in fields or "eagle_config" in fields else None


def config_from_public(fields: Mapping[str, Any]) -> tuple[Eagle3Config, tuple[int, ...]]:
    """Return the head that a `config.json` of either dialect describes, and the policy's layers that it reads on entry.

    The layers are empty if the file does not state them: EAGLE-3's defaults apply.

    Raises a one-line ValueError with the field, its value and what is allowed: for a missing field, a value that is not
    implemented, or an unknown field.
    """
    if dialect_of(fields) == "speculators":
        check("speculators_model_type", fields["speculators_model_type"], ("eagle3",))
        refuse_unknown(fields, _READ_FIELDS | _CARRIED)
        layer = nested(fields, "transformer_layer_config", required=True)
        return _head(fields, layer, layer_ids(fields, _LAYERS), True)
    eagle = nested(fields, "eagle_config")
    refuse_unknown(eagle, {_LAYERS, "use_aux_hidden_state"}, "eagle_config.")
    one_of(fields, "model_type", ("llama",))
    one_of(fields, "num_hidden_layers", (1,))
    head_fields = {"eagle_config", *_FLAGS, *_VOCABULARY}
    layer = {name: value for name, value in fields.items() if name not in head_fields}
    return _head(fields, layer, layer_ids(eagle, _LAYERS, 1), boolean(eagle, "use_aux_hidden_state", default=True))


def config_to_public(
    config: Eagle3Config,
    layers: tuple[int, ...],
    dialect: Dialect,
    verifier: str | None = None,
    policy: DecoderConfig | None = None,
) -> dict[str, Any]:
    """Return the fields of a `config.json` in this dialect.

    Args:
        config: shape of the head.
        layers: layers that the head reads, as `config_from_public` returns them.
        dialect: dialect to write.
        verifier: the policy's name or path, which only speculators' files state.
        policy: the policy's shape, whose architecture speculators' files state; None if unknown.

    Raises ValueError if the dialect cannot describe the head.
    """
    if dialect in ("zlab", "deepspec"):
        raise ValueError(f"kind: {dialect} has block drafts only; write the dialect specforge or speculators")
    outer: dict[str, Any] = {"draft_vocab_size": config.draft_vocab_size, "target_hidden_size": None}
    outer |= {name: getattr(config, name) for name in _FLAGS}
    if dialect == "speculators":
        if not config.use_aux_hidden_state:
            raise ValueError("use_aux_hidden_state = False: not supported by speculators; write the dialect specforge")
        greedy = dict(proposal_type="greedy", speculative_tokens=3, verifier_accept_k=1, accept_tolerance=0.0)
        return outer | {
            "architectures": ["Eagle3Speculator"],
            _LAYERS: list(layers) or None,
            "embed_requires_grad": False,
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [greedy],
                "verifier": {"name_or_path": verifier, "architectures": architectures_of(policy)},
            },
            "speculators_model_type": "eagle3",
            "tie_word_embeddings": False,
            "torch_dtype": config.param_dtype,
            "transformer_layer_config": _layer_fields(config),
        }
    config_fields = Eagle3Config.__dataclass_fields__
    for name in ("num_layers", "qk_norm", "sliding_window", "norm_before_fc", "norm_before_residual"):
        if getattr(config, name) != config_fields[name].default:
            raise ValueError(
                f"{name} = {getattr(config, name)}: not supported by specforge; write the dialect speculators"
            )
    if 0 in layers:
        raise ValueError(
            f"feature_layers = {layers}: specforge cannot express the input of layer 0; write the dialect speculators"
        )
    eagle: dict[str, Any] = {"use_aux_hidden_state": config.use_aux_hidden_state}
    if layers:
        eagle[_LAYERS] = [i - 1 for i in layers]
    fields = {name: value for name, value in outer.items() if value not in (None, False)}
    return {**_layer_fields(config), **fields, "architectures": ["LlamaForCausalLMEagle3"], "eagle_config": eagle}


def check_repeated(fields: Mapping[str, Any], layer: Mapping[str, Any]) -> None:
    """Raise ValueError if fields of a draft's `config.json` that state the same fact contradict each other.

    layer: the fields of its layers, whose width is that of the policy's hidden states.
    """
    either({"hidden_size": layer.get("hidden_size"), **fields}, "target_hidden_size", "hidden_size")
    algorithm, inner = "speculators_config.algorithm", nested(fields, "speculators_config")
    either({**fields, algorithm: inner.get("algorithm")}, algorithm, "speculators_model_type")
    kinds, kind = ("eagle3", "dflash", "dspark"), fields.get("speculators_model_type")
    for name in texts(fields, "architectures") if kind in kinds else ():
        if any(other in name.lower() for other in kinds if other != kind):
            raise ValueError(f"architectures = {show(name)}: contradicts speculators_model_type = {show(kind)}")


def stating_dtype(fields: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return a `config.json` with every dtype field, also in nested objects, set to this dtype."""
    nested = {name: stating_dtype(value, dtype) if isinstance(value, dict) else value for name, value in fields.items()}
    return {name: dtype if name in ("dtype", "torch_dtype") else value for name, value in nested.items()}


def check_stated_policy(fields: Mapping[str, Any], policy: DecoderConfig) -> None:
    """Raise ValueError if a draft's `config.json` states a policy of another family or number of layers."""
    if "num_target_layers" in fields and (stated := integer(fields, "num_target_layers")) != policy.num_layers:
        raise ValueError(f"num_target_layers = {stated}: must be {policy.num_layers}, the policy's number of layers")
    verifier = nested(nested(fields, "speculators_config"), "verifier")
    made_for = texts(verifier, "architectures")
    alike = [
        family.architecture
        for family in FAMILIES.values()
        if (family.qk_norm, family.qkv_bias) == (policy.qk_norm, policy.qkv_bias)
    ]
    if made_for and not set(made_for) & set(alike):
        raise ValueError(f"made for {made_for[0]} ({verifier.get('name_or_path')}), but the policy is {alike[0]}")


def architectures_of(policy: DecoderConfig | None) -> list[str]:
    """Return the `architectures` of the policy's config.json, empty if unknown or if no family has such a policy."""
    try:
        return [] if policy is None else config_to_hf(policy)["architectures"]
    except ValueError:
        return []


def _head(
    fields: Mapping[str, Any], layer: Mapping[str, Any], layers: tuple[int, ...], use_aux_hidden_state: bool
) -> tuple[Eagle3Config, tuple[int, ...]]:
    """Return the head's config and the layers that it reads.

    fields: the fields of the head. layer: the fields of a decoder with the same kind of layers.
    """
    layer = {**layer}
    layer.pop("architectures", None)
    layer.pop("tie_word_embeddings", None)  # a head always has its own lm_head
    kinds = texts(layer, "layer_types") or ["full_attention"]
    if len(set(kinds)) > 1 or kinds[0] not in ("full_attention", "sliding_attention"):
        raise ValueError(f"layer_types = {show(kinds)}: must be all full_attention or all sliding_attention")
    for name in ("dtype", "torch_dtype"):
        if layer.get(name) == "float16":  # the tensors keep float16; the compute dtype is float32
            layer[name] = "float32"
    sliding = kinds[0] == "sliding_attention"
    window = integer(layer, "sliding_window") if sliding else None
    if sliding:  # heads have windows even in families whose policies have none
        for name in ("layer_types", "use_sliding_window"):
            layer.pop(name, None)
    decoder = config_from_hf(layer, ())
    check("model_type", layer["model_type"], ("llama", "qwen3"))
    if len(set(decoder.windows)) > 1:
        first_sliding = layer["max_window_layers"]
        raise ValueError(f"max_window_layers = {first_sliding}: must leave all {decoder.num_layers} layers alike")
    size = decoder.hidden_size
    check_repeated(fields, {"hidden_size": size})
    num_features = len(layers or (0, 1, 2)) if use_aux_hidden_state else 1
    flags: dict[str, Any] = {name: boolean(fields, name) for name in _FLAGS}
    config = Eagle3Config(
        **decoder.layer_options(),
        vocab_size=decoder.vocab_size,
        draft_vocab_size=integer(fields, "draft_vocab_size", default=decoder.vocab_size),
        feature_size=size * num_features,
        max_positions=decoder.max_positions,
        num_layers=decoder.num_layers,
        sliding_window=window if sliding else decoder.windows[0],
        use_aux_hidden_state=use_aux_hidden_state,
        **flags,
    )
    return config, layers if use_aux_hidden_state else ()


def _layer_fields(config: Eagle3Config) -> dict[str, Any]:
    """Return the `config.json` fields of a decoder with the same kind of layers as the head."""
    decoder = DecoderConfig(
        **config.layer_options(),
        vocab_size=config.vocab_size,
        num_layers=config.num_layers,
        max_positions=config.max_positions,
    )
    fields = config_to_hf(decoder)
    if config.sliding_window is not None:
        fields["sliding_window"] = config.sliding_window
        fields["layer_types"] = ["sliding_attention"] * config.num_layers
    return fields

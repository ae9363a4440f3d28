"""Dialects of drafts' `config.json`: how each lays out a kind of draft, and what they share.

`specforge`, also of SafeAILab's EAGLE, has EAGLE-3 heads. `zlab` (DFlash) and `deepspec` have block drafts.
`speculators`, vLLM's library of this name, has both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from models.config import DecoderConfig
from models.drafts.block import BlockConfig
from models.drafts.eagle3 import Eagle3Config
from models.hf.config import config_to_hf
from models.hf.drafts.stated_policy import StatedPolicy
from models.json_fields import either, nested, refuse_unknown, show, texts

Dialect = Literal["specforge", "speculators", "zlab", "deepspec"]

EAGLE3_FLAGS = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")
CONFIDENCE = ("enable_confidence_head", "confidence_head_with_markov")
_EAGLE3 = frozenset({*EAGLE3_FLAGS, "draft_vocab_size", "target_hidden_size"})
_BLOCK = frozenset({"block_size", "mask_token_id", "markov_rank", "markov_head_type", *CONFIDENCE})
# Fields of every file of speculators. Most are book-keeping, which does not affect the forward.
_SPECULATORS = frozenset({
    "architectures", "auto_map", "draft_vocab_size", "dtype", "has_no_defaults_at_init", "speculators_config",
    "speculators_model_type", "speculators_version", "target_hidden_size", "tie_word_embeddings", "torch_dtype",
    "transformer_layer_config", "transformers_version",
})  # fmt: skip
_SPECULATORS_EAGLE3 = _SPECULATORS | _EAGLE3 | {
    "_name_or_path", "eagle_aux_hidden_state_layer_ids", "embed_requires_grad", "enable_sp_ulysses", "model_type",
    "return_dict",
}  # fmt: skip
_SPECULATORS_BLOCK = _SPECULATORS | _BLOCK | {
    "aux_hidden_state_layer_ids", "sample_from_anchor", "sliding_window_non_causal",
}  # fmt: skip


@dataclass(frozen=True)
class Format:
    """How a dialect lays out a kind of draft.

    Attributes:
        fields: Fields of the draft. In files of speculators they are all, and one holds the fields of its decoder
            layers; in others the remaining fields describe its decoder layers.
        layers: Field with the policy's layers that the draft reads.
        offset: We number a layer by its input, the residual stream on entry to it. 1: the file numbers it by its
            output, i - 1 for our i.
        inner: Object that holds some fields of the draft, and the names of these.
        architecture: Value of `architectures`.
        defaults: Values of fields that a file does not state.
        fixed: Values of fields that a file cannot state.
    """

    architecture: str
    fields: frozenset[str]
    layers: str
    offset: int = 1
    inner: tuple[str, frozenset[str]] | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)


# By dialect; formats of speculators by `speculators_model_type`.
FORMATS = {
    "specforge": Format(
        architecture="LlamaForCausalLMEagle3",
        fields=_EAGLE3 | {"eagle_config"},
        layers="eagle_aux_hidden_state_layer_ids",
        inner=("eagle_config", frozenset({"eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state"})),
        defaults={"use_aux_hidden_state": True},
    ),
    "eagle3": Format(
        architecture="Eagle3Speculator",
        fields=_SPECULATORS_EAGLE3,
        layers="eagle_aux_hidden_state_layer_ids",
        offset=0,
        fixed={"use_aux_hidden_state": True},
    ),
    "zlab": Format(
        architecture="DFlashDraftModel",
        fields=frozenset({"block_size", "dflash_config", "is_causal", "num_target_layers"}),
        layers="target_layer_ids",
        inner=("dflash_config", frozenset({"target_layer_ids", "mask_token_id", "block_size", "causal"})),
        fixed={"sample_from_anchor": False, "markov_rank": 0, "enable_confidence_head": False},
    ),
    "deepspec": Format(
        architecture="Qwen3DSparkModel",
        fields=_BLOCK | {"target_layer_ids", "num_target_layers", "num_anchors"},
        layers="target_layer_ids",
        fixed={"sample_from_anchor": True, "sliding_window_non_causal": False},
    ),
    "dflash": Format(
        architecture="DFlashSpeculator",
        fields=_SPECULATORS_BLOCK,
        layers="aux_hidden_state_layer_ids",
        offset=0,
        fixed={"markov_rank": 0, "enable_confidence_head": False},
    ),
    "dspark": Format(
        architecture="DSparkSpeculator",
        fields=_SPECULATORS_BLOCK,
        layers="aux_hidden_state_layer_ids",
        offset=0,
        defaults={"sample_from_anchor": True, "enable_confidence_head": True},
    ),
}


def dialect_of(fields: Mapping[str, Any]) -> Dialect | None:
    """Return the dialect of a `config.json`; None if it does not describe a draft."""
    if "speculators_model_type" in fields:
        return "speculators"
    if "dflash_config" in fields:
        return "zlab"
    if "target_layer_ids" in fields:
        return "deepspec"
    eagle = any(name.endswith("Eagle3") for name in texts(fields, "architectures"))
    return "specforge" if eagle or "draft_vocab_size" in fields or "eagle_config" in fields else None


def split_fields(fields: Mapping[str, Any], form: Format) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of the draft, with the format's defaults, and the fields of a decoder with such layers.

    Raises ValueError for an unknown field outside the decoder's, or two that contradict each other.
    """
    if "transformer_layer_config" in form.fields:
        refuse_unknown(fields, form.fields)
        layer = nested(fields, "transformer_layer_config", required=True)
    else:
        layer = {name: value for name, value in fields.items() if name not in form.fields}
    inner: dict[str, Any] = {}
    if form.inner is not None:
        inner = nested(fields, form.inner[0])
        refuse_unknown(inner, form.inner[1], f"{form.inner[0]}.")
    if "target_hidden_size" in form.fields:
        _check_repeated(fields, layer)
    stated = {**fields, **inner}
    missing = {name: value for name, value in form.defaults.items() if stated.get(name) is None}
    return {**stated, **missing, **form.fixed}, layer


def _check_repeated(fields: Mapping[str, Any], layer: Mapping[str, Any]) -> None:
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


def layer_fields(config: Eagle3Config | BlockConfig, **windows: Any) -> dict[str, Any]:
    """Return the `config.json` of a decoder with such layers. windows: its `sliding_window` and `sliding_layers`."""
    sizes = {name: getattr(config, name) for name in ("vocab_size", "num_layers", "max_positions")}
    return config_to_hf(DecoderConfig(**config.layer_options(), **sizes, **windows))


def speculators_fields(
    config: Eagle3Config | BlockConfig,
    layers: Sequence[int],
    policy: StatedPolicy,
    layer: Mapping[str, Any],
    proposal: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the fields of speculators that both kinds of draft have. proposal: of its greedy proposals."""
    form = FORMATS[config.kind]
    return {
        "architectures": [form.architecture],
        form.layers: list(layers) or None,
        "draft_vocab_size": config.draft_vocab_size,
        "speculators_config": {
            "algorithm": config.kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", **proposal}],
            "verifier": {"name_or_path": policy.name, "architectures": list(policy.architectures)},
        },
        "speculators_model_type": config.kind,
        "tie_word_embeddings": False,
        "torch_dtype": config.param_dtype,
        "transformer_layer_config": dict(layer),
    }

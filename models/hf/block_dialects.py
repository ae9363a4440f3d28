"""The `config.json` of block drafts in the dialects of z-lab (DFlash), speculators and DeepSpec.

They differ in what they count. z-lab and speculators count the slots of a block, DeepSpec the drafted tokens. We read
the residual stream on entry to layer i: speculators calls it i too, the others i - 1, the layer whose output it is.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from models.config import DecoderConfig
from models.drafts.block import BlockConfig
from models.hf.config import config_from_hf, config_to_hf
from models.hf.eagle3_dialects import Dialect, architectures_of, check_repeated
from models.json_fields import boolean, check, either, integer, layer_ids, nested, refuse_unknown, show, texts

BlockDialect = Literal["zlab", "speculators", "deepspec"]

_SPECULATORS = frozenset({
    "architectures", "auto_map", "aux_hidden_state_layer_ids", "block_size", "confidence_head_with_markov",
    "draft_vocab_size", "dtype", "enable_confidence_head", "has_no_defaults_at_init", "markov_head_type", "markov_rank",
    "mask_token_id", "sample_from_anchor", "sliding_window_non_causal", "speculators_config", "speculators_model_type",
    "speculators_version", "target_hidden_size", "tie_word_embeddings", "torch_dtype", "transformer_layer_config",
    "transformers_version",
})  # fmt: skip
_CONFIDENCE = ("enable_confidence_head", "confidence_head_with_markov")
_ZLAB = frozenset({"target_layer_ids", "mask_token_id", "block_size", "causal"})
_DEEPSPEC = (
    *("target_layer_ids", "block_size", "mask_token_id", "num_target_layers", "num_anchors", "markov_rank"),
    *("markov_head_type", *_CONFIDENCE),
)


def block_dialect_of(fields: Mapping[str, Any]) -> BlockDialect | None:
    """Return the dialect of a `config.json`; None if it does not describe a block draft."""
    if fields.get("speculators_model_type") in ("dflash", "dspark", "dflash2"):
        return "speculators"
    if "dflash_config" in fields:
        return "zlab"
    return "deepspec" if "target_layer_ids" in fields else None


class StatedPolicy(NamedTuple):
    """Facts that a draft's `config.json` states about the policy that it was made for.

    Attributes:
        name: Name or path, only in speculators' files; None if unknown.
        num_layers: Number of layers, only in z-lab's and DeepSpec's; None if unknown.
        architectures: Its own `architectures`, only in speculators'; empty if unknown.
    """

    name: str | None = None
    num_layers: int | None = None
    architectures: Sequence[str] = ()


def stated_policy(policy: DecoderConfig, name: str | None = None) -> StatedPolicy:
    """Return what a draft's files state of a policy of this shape. name: name or path for serving engines."""
    return StatedPolicy(name, policy.num_layers, architectures_of(policy))


def block_to_public(
    config: BlockConfig, layers: tuple[int, ...], dialect: Dialect, policy: StatedPolicy
) -> dict[str, Any]:
    """Return the fields of a `config.json` in this dialect. Raises ValueError if it cannot describe the draft."""
    if dialect == "specforge":
        raise ValueError("kind: specforge has EAGLE-3 heads only; write the dialect zlab, speculators or deepspec")
    if config.mask_token_id is None:
        raise ValueError("mask_token_id = None: the draft has a mask row of its own, which public files cannot hold")
    decoder = DecoderConfig(
        **config.layer_options(),
        vocab_size=config.vocab_size,
        num_layers=config.num_layers,
        max_positions=config.max_positions,
        sliding_window=config.sliding_window,
        sliding_layers=config.sliding_layers,
    )
    layer = config_to_hf(decoder)
    if dialect == "speculators":
        return _to_speculators(config, layers, policy, layer)
    if config.own_head:
        raise ValueError(
            f"draft_vocab_size = {config.draft_vocab_size}: must be {config.vocab_size}, the policy's, for {dialect}; "
            "write speculators"
        )
    if policy.num_layers is None:
        raise ValueError(
            f"num_target_layers = None: {dialect} states the number of the policy's layers, which is not known here; "
            "needs a made_for.json beside the draft, or launch.export or launch.distill"
        )
    outputs = [i - 1 for i in layers]
    return layer | (_to_zlab if dialect == "zlab" else _to_deepspec)(config, outputs, policy.num_layers)


def _to_zlab(config: BlockConfig, outputs: list[int], num_target_layers: int) -> dict[str, Any]:
    """Return the fields beside those of the layers. outputs: the policy's layers whose outputs the draft reads."""
    for name in ("sample_from_anchor", "markov_rank", "enable_confidence_head"):
        if value := getattr(config, name):
            raise ValueError(f"{name} = {value}: zlab has DFlash drafts only; write speculators or deepspec")
    if -1 in outputs:
        raise ValueError(
            "feature_layers = 0, ..: zlab cannot express the input of layer 0; write speculators or deepspec"
        )
    fields = {
        "architectures": ["DFlashDraftModel"],
        "block_size": config.block_size + 1,
        "dflash_config": {"mask_token_id": config.mask_token_id, "target_layer_ids": outputs},
        "num_target_layers": num_target_layers,
    }
    # z-lab and vLLM apply a stated value to every layer. By default, sliding layers are causal and full ones are not.
    return fields if _is_causal(config) else fields | {"is_causal": False}


def _to_deepspec(config: BlockConfig, outputs: list[int], num_target_layers: int) -> dict[str, Any]:
    """Return the fields beside those of the layers. outputs: the policy's layers whose outputs the draft reads."""
    if not config.sample_from_anchor:
        raise ValueError("sample_from_anchor = False: deepspec has no such drafts; write zlab or speculators")
    if config.sliding_window is not None:
        raise ValueError(f"sliding_window = {config.sliding_window}: must be None for deepspec; write speculators")
    return {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        # Of its training. DeepSpec reads no file without it.
        "num_anchors": 512,
        "num_target_layers": num_target_layers,
        "target_layer_ids": outputs,
        **_heads_to_public(config),
    }


def _to_speculators(
    config: BlockConfig, layers: tuple[int, ...], policy: StatedPolicy, layer: Mapping[str, Any]
) -> dict[str, Any]:
    """Return all fields. layer: fields of a decoder of such layers."""
    kind = config.kind
    greedy = {"proposal_type": "greedy", "speculative_tokens": config.block_size}
    return {
        "architectures": ["DSparkSpeculator" if kind == "dspark" else "DFlashSpeculator"],
        "aux_hidden_state_layer_ids": list(layers),
        "block_size": config.block_size + (not config.sample_from_anchor),
        "draft_vocab_size": config.draft_vocab_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        # Versions of vLLM take false for full layers too.
        "sliding_window_non_causal": not _is_causal(config),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy],
            "verifier": {"name_or_path": policy.name, "architectures": list(policy.architectures)},
        },
        "speculators_model_type": kind,
        "target_hidden_size": config.hidden_size,
        "tie_word_embeddings": False,
        "torch_dtype": config.param_dtype,
        "transformer_layer_config": layer,
        **(_heads_to_public(config) if kind == "dspark" else {}),
    }


def _is_causal(config: BlockConfig) -> bool:
    """Return whether some layers attend causally within the block."""
    return config.sliding_window is not None and config.sliding_causal


def _heads_to_public(config: BlockConfig) -> dict[str, Any]:
    """Return the fields of DSpark's heads."""
    confidence = {name: getattr(config, name) for name in _CONFIDENCE}
    return {"markov_rank": config.markov_rank, "markov_head_type": "vanilla", **confidence}


def block_from_public(fields: Mapping[str, Any]) -> tuple[BlockConfig, tuple[int, ...]]:
    """Return the block draft that a `config.json` describes, and the policy's layers that it reads on entry.

    Raises a one-line ValueError with the field, its value and what is allowed: for a missing field, a value that is not
    implemented, or an unknown field.
    """
    match block_dialect_of(fields):
        case "speculators":
            return _from_speculators(fields)
        case "zlab":
            return _from_zlab(fields)
        case "deepspec":
            return _from_deepspec(fields)
    raise ValueError("speculators_model_type, dflash_config, target_layer_ids: must be present in a block draft")


def _from_speculators(fields: Mapping[str, Any]) -> tuple[BlockConfig, tuple[int, ...]]:
    check("speculators_model_type", kind := fields["speculators_model_type"], ("dflash", "dspark"))
    refuse_unknown(fields, _SPECULATORS)
    layer = nested(fields, "transformer_layer_config", required=True)
    check_repeated(fields, layer)
    layer = _with_dtype(fields, layer)
    slots = integer(fields, "block_size")
    from_anchor = boolean(fields, "sample_from_anchor", default=kind == "dspark")
    own_vocabulary = fields.get("draft_vocab_size") is not None
    return _draft(
        layer,
        layer_ids(fields, "aux_hidden_state_layer_ids"),
        integer(fields, "draft_vocab_size") if own_vocabulary else None,
        block_size=slots if from_anchor else slots - 1,
        sample_from_anchor=from_anchor,
        mask_token_id=_token(fields, "mask_token_id"),
        sliding_causal=not boolean(fields, "sliding_window_non_causal"),
        **(_heads(fields, confidence=True) if kind == "dspark" else {}),
    )


def _with_dtype(fields: Mapping[str, Any], layer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the layers' fields with the dtype that the file states for the whole draft, which must not differ."""
    (name, dtype), (inner, theirs) = (either(each, "dtype", "torch_dtype") for each in (fields, layer))
    inner = f"transformer_layer_config.{inner}"
    either({name: dtype, inner: theirs}, name, inner)
    return layer if dtype is None else {**layer, "dtype": dtype}


def _from_zlab(fields: Mapping[str, Any]) -> tuple[BlockConfig, tuple[int, ...]]:
    inner = nested(fields, "dflash_config", required=True)
    refuse_unknown(inner, _ZLAB, "dflash_config.")
    for name in texts(fields, "architectures"):
        check("architectures", name, ("DFlashDraftModel",))
    stated = {**fields, **{f"dflash_config.{name}": value for name, value in inner.items()}}
    size_name, size = either(stated, "dflash_config.block_size", "block_size")
    slots = integer({size_name: size}, size_name)
    name, causal = either(stated, "dflash_config.causal", "is_causal")
    causal = None if causal is None else boolean(stated, name)
    layer = {name: x for name, x in fields.items() if name not in ("dflash_config", "block_size", "is_causal")}
    layer.pop("num_target_layers", None)
    config, layers = _draft(
        layer,
        layer_ids(inner, "target_layer_ids", 1),
        block_size=slots - 1,
        sample_from_anchor=False,
        mask_token_id=_token(inner, "mask_token_id"),
        sliding_causal=causal is not False,
    )
    # A stated value is that of every layer.
    if causal and None in config.windows:
        raise ValueError(f"{name} = true: must be false or absent with full_attention layers")
    return config, layers


def _from_deepspec(fields: Mapping[str, Any]) -> tuple[BlockConfig, tuple[int, ...]]:
    for name in texts(fields, "architectures"):
        check("architectures", name, ("Qwen3DSparkModel",))
    return _draft(
        {name: value for name, value in fields.items() if name not in _DEEPSPEC},
        layer_ids(fields, "target_layer_ids", 1),
        block_size=integer(fields, "block_size"),
        sample_from_anchor=True,
        mask_token_id=_token(fields, "mask_token_id"),
        **_heads(fields, confidence=False),
    )


def _draft(
    layer: Mapping[str, Any], layers: tuple[int, ...], draft_vocab_size: int | None = None, **options: Any
) -> tuple[BlockConfig, tuple[int, ...]]:
    """Return the draft's config and the layers that it reads.

    Args:
        layer: fields of a decoder of such layers.
        layers: layers that it reads.
        draft_vocab_size: size of its vocabulary; None: the policy's.
        options: further fields of its config.
    """
    if not layers:
        raise ValueError("target_layer_ids: missing; must list the policy's layers that the draft reads")
    layer = dict(layer)
    count, window = integer(layer, "num_hidden_layers"), layer.pop("sliding_window", None)
    # transformers drops the window of a file without this switch.
    windows = boolean(layer, "use_sliding_window")
    kinds = texts(layer, "layer_types") or ["full_attention"] * count
    for kind in kinds:
        check("layer_types", kind, ("full_attention", "sliding_attention"))
    if len(kinds) != count:
        raise ValueError(f"layer_types = {show(kinds)}: must name num_hidden_layers = {count} layers")
    sliding = tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    if windows and not layer.get("layer_types"):
        raise ValueError("layer_types: missing; must name the kind of each layer with use_sliding_window = true")
    if sliding and not windows:
        raise ValueError("use_sliding_window = false: must be true with sliding_attention layers")
    if sliding:
        window = integer({"sliding_window": window}, "sliding_window")
    else:
        options["sliding_causal"] = True
    for name in ("architectures", "auto_map", "layer_types", "max_window_layers", "use_sliding_window"):
        layer.pop(name, None)
    check("model_type", layer.get("model_type"), ("qwen3",))
    decoder = config_from_hf(layer, ())
    config = BlockConfig(
        **decoder.layer_options(),
        vocab_size=decoder.vocab_size,
        draft_vocab_size=draft_vocab_size or decoder.vocab_size,
        feature_size=decoder.hidden_size * len(layers),
        num_layers=count,
        max_positions=decoder.max_positions,
        sliding_window=window if sliding else None,
        sliding_layers=sliding if sliding and len(sliding) < count else None,
        **options,
    )
    return config, layers


def _token(fields: Mapping[str, Any], name: str) -> int:
    """Return a required token id."""
    value = fields.get(name)
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} = {show(value)}: must be a token id")
    return value


def _heads(fields: Mapping[str, Any], confidence: bool) -> dict[str, Any]:
    """Return the fields of DSpark's heads. confidence: whether a file that does not say has a confidence head."""
    rank = 0
    if fields.get("markov_rank") not in (None, 0):
        check("markov_head_type", fields.get("markov_head_type", "vanilla"), ("vanilla",))
        rank = integer(fields, "markov_rank")
    enabled = boolean(fields, "enable_confidence_head", default=confidence)
    with_markov = enabled and boolean(fields, "confidence_head_with_markov", default=True)
    return dict(markov_rank=rank, enable_confidence_head=enabled, confidence_head_with_markov=with_markov)

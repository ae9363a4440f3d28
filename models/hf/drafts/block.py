"""The `config.json` of block drafts.

Its `block_size` counts the slots of a block. The anchor's, the first, drafts a token in DSpark and none in DFlash.
"""

from collections.abc import Mapping
from typing import Any

from models.drafts.block import BlockConfig
from models.hf.config import config_from_hf
from models.hf.drafts.dialects import CONFIDENCE, FORMATS, Dialect, layer_fields, speculators_fields, split_fields
from models.hf.drafts.stated_policy import StatedPolicy
from models.json_fields import boolean, check, either, integer, layer_ids, nested, show, texts

_FULL, _SLIDING = "full_attention", "sliding_attention"


def block_from_public(fields: Mapping[str, Any], name: str) -> tuple[BlockConfig, tuple[int, ...]]:
    """Return the block draft that a `config.json` describes, and the policy's layers that it reads on entry.

    See `draft_from_public` for errors.

    name: of its format, one of FORMATS.
    """
    form = FORMATS[name]
    own, layer = split_fields(fields, form)
    if name == "zlab":
        own |= _stated_twice(fields)
    if name in ("zlab", "deepspec"):
        for architecture in texts(fields, "architectures"):
            check("architectures", architecture, (form.architecture,))
    else:
        layer = _with_dtype(fields, layer)
    from_anchor, layers = boolean(own, "sample_from_anchor"), layer_ids(own, form.layers, form.offset)
    mask_token_id = own.get("mask_token_id")
    if type(mask_token_id) is not int or mask_token_id < 0:
        raise ValueError(f"mask_token_id = {show(mask_token_id)}: must be a token id")
    if not layers:
        raise ValueError("target_layer_ids: missing; must list the policy's layers that the draft reads")
    slots, heads, causal = integer(own, "block_size"), _heads(own), not boolean(own, "sliding_window_non_causal")
    _check_windows(layer)
    check("model_type", layer.get("model_type"), ("qwen3",))
    switch = {"use_sliding_window": boolean(layer, "use_sliding_window")}
    decoder = config_from_hf({name: x for name, x in layer.items() if name != "architectures"} | switch, ())
    config = BlockConfig(
        **decoder.layer_options(),
        vocab_size=decoder.vocab_size,
        draft_vocab_size=integer(own, "draft_vocab_size", decoder.vocab_size),
        feature_size=decoder.hidden_size * len(layers),
        block_size=slots - (not from_anchor),
        num_layers=decoder.num_layers,
        max_positions=decoder.max_positions,
        sample_from_anchor=from_anchor,
        mask_token_id=mask_token_id,
        sliding_window=decoder.sliding_window,
        sliding_layers=decoder.sliding_layers,
        sliding_causal=causal or decoder.sliding_window is None,
        **heads,
    )
    return config, layers


def _stated_twice(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that z-lab's files may state in two places, by speculators' names."""
    inner = {f"dflash_config.{name}": x for name, x in nested(fields, "dflash_config", required=True).items()}
    size_name, size = either({**fields, **inner}, "dflash_config.block_size", "block_size")
    name, causal = either({**fields, **inner}, "dflash_config.causal", "is_causal")
    causal = None if causal is None else boolean({name: causal}, name)
    # A stated value is that of every layer.
    if causal and set(texts(fields, "layer_types")) != {_SLIDING}:
        raise ValueError(f"{name} = true: must be false or absent with full_attention layers")
    return {"block_size": integer({size_name: size}, size_name), "sliding_window_non_causal": causal is False}


def _with_dtype(fields: Mapping[str, Any], layer: dict[str, Any]) -> dict[str, Any]:
    """Return the layers' fields with the dtype that the file states for the whole draft, which must not differ."""
    (name, dtype), (inner, theirs) = (either(each, "dtype", "torch_dtype") for each in (fields, layer))
    inner = f"transformer_layer_config.{inner}"
    either({name: dtype, inner: theirs}, name, inner)
    return layer if dtype is None else {**layer, "dtype": dtype}


def _heads(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of DSpark's heads."""
    rank = 0
    if own.get("markov_rank") not in (None, 0):
        check("markov_head_type", own.get("markov_head_type", "vanilla"), ("vanilla",))
        rank = integer(own, "markov_rank")
    enabled = boolean(own, "enable_confidence_head")
    with_markov = enabled and boolean(own, "confidence_head_with_markov", default=True)
    return dict(markov_rank=rank, enable_confidence_head=enabled, confidence_head_with_markov=with_markov)


def _check_windows(layer: Mapping[str, Any]) -> None:
    """Raise ValueError unless the fields of the layers name the kind of each layer, if any has a window.

    transformers drops the window of a file whose switch is off.
    """
    kinds, windows = texts(layer, "layer_types"), boolean(layer, "use_sliding_window")
    for kind in kinds:
        check("layer_types", kind, (_FULL, _SLIDING))
    if kinds and len(kinds) != (count := integer(layer, "num_hidden_layers")):
        raise ValueError(f"layer_types = {show(kinds)}: must name num_hidden_layers = {count} layers")
    if windows and not kinds:
        raise ValueError("layer_types: missing; must name the kind of each layer with use_sliding_window = true")
    if _SLIDING in kinds:
        if not windows:
            raise ValueError("use_sliding_window = false: must be true with sliding_attention layers")
        integer(layer, "sliding_window")


def block_to_public(
    config: BlockConfig, layers: tuple[int, ...], dialect: Dialect, policy: StatedPolicy
) -> dict[str, Any]:
    """Return the fields of a `config.json` in this dialect. Raises ValueError if it cannot describe the draft."""
    if dialect == "specforge":
        raise ValueError("kind: specforge has EAGLE-3 heads only; write the dialect zlab, speculators or deepspec")
    if config.mask_token_id is None:
        raise ValueError("mask_token_id = None: the draft has a mask row of its own, which public files cannot hold")
    layer = layer_fields(config, sliding_window=config.sliding_window, sliding_layers=config.sliding_layers)
    mask = {"mask_token_id": config.mask_token_id}
    size = {"block_size": config.block_size + (not config.sample_from_anchor)}
    # z-lab and versions of vLLM apply a stated value to every layer. By default, sliding layers are causal and full
    # ones are not.
    causal = config.sliding_window is not None and config.sliding_causal
    heads = {"markov_rank": config.markov_rank, "markov_head_type": "vanilla"}
    heads |= {name: getattr(config, name) for name in CONFIDENCE}
    if dialect == "speculators":
        common = speculators_fields(config, layers, policy, layer, {"speculative_tokens": config.block_size})
        common |= {"sliding_window_non_causal": not causal, "target_hidden_size": config.hidden_size}
        common |= {"sample_from_anchor": config.sample_from_anchor, **mask, **size}
        return common | heads if config.kind == "dspark" else common
    _check_describes(config, layers, dialect, policy)
    form = FORMATS[dialect]
    outputs = {form.layers: [i - form.offset for i in layers]}
    beside = {"architectures": [form.architecture], "num_target_layers": policy.num_layers}
    if dialect == "zlab":
        return layer | beside | size | {"dflash_config": mask | outputs} | ({} if causal else {"is_causal": False})
    # num_anchors is of its training. DeepSpec reads no file without it.
    return layer | beside | size | mask | outputs | heads | {"num_anchors": 512}


def _check_describes(config: BlockConfig, layers: tuple[int, ...], dialect: Dialect, policy: StatedPolicy) -> None:
    """Raise ValueError if z-lab's or DeepSpec's files cannot describe the draft, or need facts that are not known."""
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
    if dialect == "zlab":
        for name in ("sample_from_anchor", "markov_rank", "enable_confidence_head"):
            if value := getattr(config, name):
                raise ValueError(f"{name} = {value}: zlab has DFlash drafts only; write speculators or deepspec")
        if 0 in layers:
            raise ValueError(
                "feature_layers = 0, ..: zlab cannot express the input of layer 0; write speculators or deepspec"
            )
    elif not config.sample_from_anchor:
        raise ValueError("sample_from_anchor = False: deepspec has no such drafts; write zlab or speculators")
    elif config.sliding_window is not None:
        raise ValueError(f"sliding_window = {config.sliding_window}: must be None for deepspec; write speculators")

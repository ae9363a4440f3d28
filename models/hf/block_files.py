"""Block drafts in the layouts of z-lab (DFlash), speculators and DeepSpec: import of all, export of the first two.

Their `config.json` differ in what they count. z-lab and speculators count the slots of a block, DeepSpec the drafted
tokens. We read the residual stream on entry to layer i: speculators calls it i too, the others i - 1, the layer whose
output it is.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from jax.sharding import Mesh

from models.checkpoints.draft import SavedDraft
from models.config import DecoderConfig, Dtype
from models.drafts.block import BlockConfig, init_block
from models.files import errors_name, new_directory, optional, read_json, write_json
from models.hf.block_layout import block_draft_tensors
from models.hf.config import config_from_hf, config_to_hf
from models.hf.eagle3_dialects import Dialect
from models.hf.eagle3_layout import EMBEDDING
from models.hf.layout import HEAD
from models.hf.load import SINGLE, check_names, open_tensors, read_tensors
from models.json_fields import boolean, check, integer, layer_ids, nested, refuse_unknown, show, texts
from models.params import by_path, fitting_params
from specjax.parallel import processes

BlockDialect = Literal["zlab", "speculators", "deepspec"]

_SPECULATORS = frozenset({
    "architectures", "auto_map", "aux_hidden_state_layer_ids", "block_size", "confidence_head_with_markov",
    "draft_vocab_size", "dtype", "enable_confidence_head", "has_no_defaults_at_init", "markov_head_type", "markov_rank",
    "mask_token_id", "sample_from_anchor", "sliding_window_non_causal", "speculators_config", "speculators_model_type",
    "speculators_version", "target_hidden_size", "tie_word_embeddings", "torch_dtype", "transformer_layer_config",
    "transformers_version",
})  # fmt: skip
_ZLAB = frozenset({"target_layer_ids", "mask_token_id", "block_size", "causal"})
_DEEPSPEC = (
    *("target_layer_ids", "block_size", "mask_token_id", "num_target_layers", "num_anchors", "markov_rank"),
    *("markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),
)
# The confidence head is not read: no draft length depends on it.
_CONFIDENCE = "confidence_head."


def block_dialect_of(fields: Mapping[str, Any]) -> BlockDialect | None:
    """Return the dialect of a `config.json`; None if it does not describe a block draft."""
    if fields.get("speculators_model_type") in ("dflash", "dspark", "dflash2"):
        return "speculators"
    if "dflash_config" in fields:
        return "zlab"
    return "deepspec" if "target_layer_ids" in fields else None


def read_block_config(directory: Path) -> tuple[BlockConfig, tuple[int, ...]]:
    """Return the draft's config and feature layers. Raises a one-line ValueError that names the field."""
    path = directory / "config.json"
    with errors_name(path):
        return block_from_public(read_json(path))


def load_block(directory: Path, mesh: Mesh, param_dtype: Dtype | None = None) -> SavedDraft:
    """Load the block draft in a directory of any dialect, sharded over the mesh. Needs safetensors.

    By default every tensor keeps its dtype. Copies of the policy's embedding and vocabulary head are not read, nor is
    a confidence head.

    Raises a one-line ValueError naming the field or tensor: for a config that is not implemented, and a missing,
    unexpected or mis-shaped tensor.
    """
    config, layers = read_block_config(directory)
    views, tensors = open_tensors(directory), block_draft_tensors(config)
    views = {
        name: view for name, view in views.items() if name not in (EMBEDDING, HEAD) and not name.startswith(_CONFIDENCE)
    }
    check_names(directory, views, tensors)
    targets = fitting_params(partial(init_block, config), mesh)
    return SavedDraft(config, read_tensors(directory, views, tensors, targets, param_dtype), None, layers)


def save_block(
    directory: Path, draft: SavedDraft, dialect: Dialect, policy: DecoderConfig, verifier: str | None = None
) -> None:
    """Write a block draft in this dialect, completely or not at all. Every tensor keeps its bits and its dtype.

    verifier: name or path of the policy, which only speculators' files state.

    Raises ValueError if the directory is in use, or the dialect cannot describe the draft, and ImportError without
    safetensors.
    """
    save_file = optional("safetensors.numpy").save_file
    flat = by_path(draft.params)
    fields = block_to_public(draft.config, draft.feature_layers, dialect, policy, verifier)
    tensors = {
        name: stored.pack(processes.fetch(flat[stored.path]))
        for name, stored in block_draft_tensors(draft.config).items()
    }
    with new_directory(directory) as temporary:
        write_json(temporary / "config.json", fields)
        if processes.primary():
            save_file(tensors, temporary / SINGLE, metadata={"format": "pt"})


def block_to_public(
    config: BlockConfig, layers: tuple[int, ...], dialect: Dialect, policy: DecoderConfig, verifier: str | None = None
) -> dict[str, Any]:
    """Return the fields of a `config.json` in this dialect. Raises ValueError if it cannot describe the draft."""
    if dialect == "specforge":
        raise ValueError("kind: specforge has EAGLE-3 heads only; write the dialect zlab or speculators")
    if config.mask_token_id is None:
        raise ValueError("mask_token_id = None: the draft has a mask row of its own, which public files cannot hold")
    slots = config.block_size + (not config.sample_from_anchor)
    decoder = DecoderConfig(
        **config.layer_options(),
        vocab_size=config.vocab_size,
        num_layers=config.num_layers,
        max_positions=config.max_positions,
        sliding_window=config.sliding_window,
        sliding_layers=config.sliding_layers,
    )
    layer = config_to_hf(decoder)
    if dialect == "zlab":
        if config.markov_rank or config.sample_from_anchor:
            raise ValueError("sample_from_anchor, markov_rank: zlab has DFlash drafts only; write speculators")
        if 0 in layers:
            raise ValueError(f"feature_layers = {layers}: zlab cannot express the input of layer 0; write speculators")
        inner = {"mask_token_id": config.mask_token_id, "target_layer_ids": [i - 1 for i in layers]}
        own = {"architectures": ["DFlashDraftModel"], "block_size": slots, "num_target_layers": policy.num_layers}
        return layer | own | {"dflash_config": inner, "is_causal": config.sliding_causal}
    kind = "dspark" if config.markov_rank else "dflash"
    markov = {"markov_rank": config.markov_rank, "markov_head_type": "vanilla", "enable_confidence_head": False}
    greedy = {"proposal_type": "greedy", "speculative_tokens": config.block_size}
    return {
        "architectures": ["DSparkSpeculator" if config.markov_rank else "DFlashSpeculator"],
        "aux_hidden_state_layer_ids": list(layers),
        "block_size": slots,
        "draft_vocab_size": config.vocab_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
        "sliding_window_non_causal": not config.sliding_causal,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [greedy],
            "verifier": {"name_or_path": verifier, "architectures": config_to_hf(policy)["architectures"]},
        },
        "speculators_model_type": kind,
        "target_hidden_size": config.hidden_size,
        "tie_word_embeddings": False,
        "torch_dtype": config.param_dtype,
        "transformer_layer_config": layer,
        **(markov if config.markov_rank else {}),
    }


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
    slots = integer(fields, "block_size")
    from_anchor = boolean(fields, "sample_from_anchor", default=kind == "dspark")
    if (size := fields.get("draft_vocab_size")) not in (None, layer.get("vocab_size")):
        raise ValueError(f"draft_vocab_size = {show(size)}: must be vocab_size = {show(layer.get('vocab_size'))}")
    return _draft(
        layer,
        layer_ids(fields, "aux_hidden_state_layer_ids"),
        block_size=slots if from_anchor else slots - 1,
        sample_from_anchor=from_anchor,
        mask_token_id=_token(fields, "mask_token_id"),
        sliding_causal=not boolean(fields, "sliding_window_non_causal"),
        markov_rank=_markov_rank(fields) if kind == "dspark" else 0,
    )


def _from_zlab(fields: Mapping[str, Any]) -> tuple[BlockConfig, tuple[int, ...]]:
    inner = nested(fields, "dflash_config", required=True)
    refuse_unknown(inner, _ZLAB, "dflash_config.")
    for name in texts(fields, "architectures"):
        check("architectures", name, ("DFlashDraftModel",))
    slots = integer({**fields, **inner}, "block_size")
    causal = inner.get("causal", fields.get("is_causal"))
    layer = {name: x for name, x in fields.items() if name not in ("dflash_config", "block_size", "is_causal")}
    layer.pop("num_target_layers", None)
    return _draft(
        layer,
        layer_ids(inner, "target_layer_ids", 1),
        block_size=slots - 1,
        sample_from_anchor=False,
        mask_token_id=_token(inner, "mask_token_id"),
        sliding_causal=causal is None or boolean({"is_causal": causal}, "is_causal"),
    )


def _from_deepspec(fields: Mapping[str, Any]) -> tuple[BlockConfig, tuple[int, ...]]:
    for name in texts(fields, "architectures"):
        check("architectures", name, ("Qwen3DSparkModel",))
    return _draft(
        {name: value for name, value in fields.items() if name not in _DEEPSPEC},
        layer_ids(fields, "target_layer_ids", 1),
        block_size=integer(fields, "block_size"),
        sample_from_anchor=True,
        mask_token_id=_token(fields, "mask_token_id"),
        markov_rank=_markov_rank(fields),
    )


def _draft(layer: Mapping[str, Any], layers: tuple[int, ...], **options: Any) -> tuple[BlockConfig, tuple[int, ...]]:
    """Return the draft's config and the layers that it reads. layer: fields of a decoder of such layers."""
    if not layers:
        raise ValueError("target_layer_ids: missing; must list the policy's layers that the draft reads")
    layer = dict(layer)
    count, window = integer(layer, "num_hidden_layers"), layer.pop("sliding_window", None)
    kinds = texts(layer, "layer_types") or ["full_attention"] * count
    for kind in kinds:
        check("layer_types", kind, ("full_attention", "sliding_attention"))
    if len(kinds) != count:
        raise ValueError(f"layer_types = {show(kinds)}: must name num_hidden_layers = {count} layers")
    sliding = tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    if sliding:
        window = integer({"sliding_window": window}, "sliding_window")
    for name in ("architectures", "auto_map", "layer_types", "max_window_layers", "use_sliding_window"):
        layer.pop(name, None)
    check("model_type", layer.get("model_type"), ("qwen3",))
    decoder = config_from_hf(layer, ())
    config = BlockConfig(
        **decoder.layer_options(),
        vocab_size=decoder.vocab_size,
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


def _markov_rank(fields: Mapping[str, Any]) -> int:
    """Return the rank of the Markov head; 0 without."""
    rank = fields.get("markov_rank")
    if rank in (None, 0):
        return 0
    check("markov_head_type", fields.get("markov_head_type", "vanilla"), ("vanilla",))
    return integer(fields, "markov_rank")

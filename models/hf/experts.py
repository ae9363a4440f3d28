"""Mixture-of-experts fields of Hugging Face's `config.json`, as Qwen3-MoE writes them."""

from collections.abc import Mapping
from typing import Any

from models.config import DecoderConfig, ExpertsConfig
from models.json_fields import boolean, either, integer, layer_ids, show

# transformers 5 writes `num_local_experts` where 4 wrote `num_experts`.
_COUNTS = ("num_experts", "num_local_experts")
EXPERT_FIELDS = frozenset({
    *_COUNTS, "decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size", "norm_topk_prob",
    "num_experts_per_tok",
})  # fmt: skip


def experts_from_hf(fields: Mapping[str, Any], num_layers: int) -> ExpertsConfig:
    """Return the mixture that the fields describe. Raises ValueError naming an invalid field.

    Every `decoder_sparse_step`-th layer has experts, counted from 1, except `mlp_only_layers`, counted from 0.
    """
    name, count = either(fields, *_COUNTS)
    step, dense = integer(fields, "decoder_sparse_step", 1), layer_ids(fields, "mlp_only_layers")
    layers = tuple(i for i in range(num_layers) if (i + 1) % step == 0 and i not in dense)
    if not layers:
        raise ValueError(f"mlp_only_layers = {show(list(dense))}: must leave at least one layer with experts")
    return ExpertsConfig(
        num_experts=integer({name: count}, name),
        active=integer(fields, "num_experts_per_tok"),
        intermediate_size=integer(fields, "moe_intermediate_size"),
        norm_topk_prob=boolean(fields, "norm_topk_prob"),
        layers=None if len(layers) == num_layers else layers,
    )


def experts_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """Return the fields that state the decoder's mixture, as transformers 4 and 5 read them; none for a dense one."""
    experts = config.experts
    if experts is None:
        return {}
    return {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i in range(config.num_layers) if i not in config.expert_layers],
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.norm_topk_prob,
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.active,
    }

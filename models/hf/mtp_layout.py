"""Tensors of an MTP head in a policy's Hugging Face checkpoint, by the names of the three conventions."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from models.drafts.mtp import ConventionName, MTPConfig
from models.hf.layout import Stored, block_tensors, linear, norm

COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_QWEN, _MIMO = "mtp.", "model.mtp_layers."


@dataclass(frozen=True)
class Names:
    """Names of an MTP head's tensors in one convention.

    Attributes:
        prefix: Prefix of all names. {layer} stands for the number of policy layers, the index of the head's layer.
        parts: Names after the prefix, without `.weight`, of all tensors outside the decoder block.
        block: Further prefix of the decoder block's names.
        copy: Name of a copy of the policy's embedding, which must be there and equal it but becomes no parameter.
        count: Field of config.json with the number of such layers, one of COUNTS.
        family: model_type that an export prefers, if it has the policy's kind of block.
    """

    prefix: str
    parts: dict[str, Stored]
    block: str = ""
    copy: str | None = None
    count: str = COUNTS[0]
    family: str | None = None


NAMES: dict[ConventionName, Names] = {
    "qwen3_next": Names(
        prefix=_QWEN,
        parts={
            "pre_fc_norm_embedding": norm("embedding_norm"),
            "pre_fc_norm_hidden": norm("hidden_norm"),
            "fc": linear("fc"),
            "norm": norm("norm"),
        },
        block="layers.0.",
        count=COUNTS[1],
    ),
    "deepseek_v3": Names(
        prefix="model.layers.{layer}.",
        parts={
            "enorm": norm("embedding_norm"),
            "hnorm": norm("hidden_norm"),
            "eh_proj": linear("fc"),
            "shared_head.norm": norm("norm"),
            "shared_head.head": linear("head"),
        },
        copy="embed_tokens",
    ),
    "mimo": Names(
        prefix=_MIMO + "0.",
        parts={
            "token_layernorm": norm("embedding_norm"),
            "hidden_layernorm": norm("hidden_norm"),
            "input_proj": linear("fc"),
            "final_layernorm": norm("norm"),
        },
        family="mimo",
    ),
}


def mtp_tensors(config: MTPConfig, policy_layers: int) -> dict[str, Stored]:
    """Return the tensors by name of a head on a policy of `policy_layers` layers, without a copy of the embedding."""
    names = NAMES[config.convention.name]
    prefix = names.prefix.format(layer=policy_layers)
    parts = {f"{prefix}{name}.weight": stored for name, stored in names.parts.items()}
    return parts | block_tensors(config, prefix + names.block, "block")


def embedding_copy(config: MTPConfig, policy_layers: int) -> str | None:
    """Return the name of the copy of the policy's embedding, None if the convention has none."""
    names = NAMES[config.convention.name]
    return None if names.copy is None else f"{names.prefix.format(layer=policy_layers)}{names.copy}.weight"


def mtp_names(names: Iterable[str], policy_layers: int) -> dict[ConventionName, list[str]]:
    """Return the names in a policy's checkpoint that belong to MTP heads, by convention.

    A layer after the policy's last counts as a head only if it has an `eh_proj`. Without one it is a decoder layer that
    `num_hidden_layers` cuts off.
    """
    names = set(names)
    names_by_convention: dict[ConventionName, list[str]] = {convention: [] for convention in NAMES}
    for name in sorted(names):
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if name.startswith(_QWEN):
            names_by_convention["qwen3_next"].append(name)
        elif name.startswith(_MIMO):
            names_by_convention["mimo"].append(name)
        elif layer and int(layer[1]) >= policy_layers and f"{layer[0]}eh_proj.weight" in names:
            names_by_convention["deepseek_v3"].append(name)
    return {convention: members for convention, members in names_by_convention.items() if members}

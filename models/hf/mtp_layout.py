"""The tensors of an MTP head in a policy's Hugging Face checkpoint, by the names of the three conventions."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from models.drafts.mtp import ConventionName, MTPConfig
from models.hf.layout import LINEAR, VECTOR, Stored, block_tensors

COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_QWEN, _MIMO = "mtp.", "model.mtp_layers."


@dataclass(frozen=True)
class Names:
    """What a convention calls the parts of a head.

    prefix: of all of them, {layer} being the number of the policy's layers, after which the head's is counted.
    block:  what follows it in the names of the decoder block.
    copy:   a copy of the policy's embedding, which is not read but must be there.
    count:  the field of config.json that says how many such layers there are, one of COUNTS.
    family: the model_type that carries the head wherever it has the policy's kind of block.
    """

    prefix: str
    block: str
    embedding_norm: str
    hidden_norm: str
    fc: str
    norm: str
    head: str | None = None
    copy: str | None = None
    count: str = COUNTS[0]
    family: str | None = None


NAMES: dict[ConventionName, Names] = {
    "qwen3_next": Names(
        prefix=_QWEN,
        block="layers.0.",
        embedding_norm="pre_fc_norm_embedding",
        hidden_norm="pre_fc_norm_hidden",
        fc="fc",
        norm="norm",
        count=COUNTS[1],
    ),
    "deepseek_v3": Names(
        prefix="model.layers.{layer}.",
        block="",
        embedding_norm="enorm",
        hidden_norm="hnorm",
        fc="eh_proj",
        norm="shared_head.norm",
        head="shared_head.head",
        copy="embed_tokens",
    ),
    "mimo": Names(
        prefix=_MIMO + "0.",
        block="",
        embedding_norm="token_layernorm",
        hidden_norm="hidden_layernorm",
        fc="input_proj",
        norm="final_layernorm",
        family="mimo",
    ),
}


def mtp_tensors(config: MTPConfig, policy_layers: int) -> dict[str, Stored]:
    """The head's tensors by name, behind a policy of so many layers. A copy of the embedding is not among them."""
    names = NAMES[config.convention.name]
    prefix = names.prefix.format(layer=policy_layers)
    tensors = {
        f"{prefix}{names.embedding_norm}.weight": Stored(("embedding_norm", "scale"), VECTOR),
        f"{prefix}{names.hidden_norm}.weight": Stored(("hidden_norm", "scale"), VECTOR),
        f"{prefix}{names.fc}.weight": Stored(("fc", "kernel"), LINEAR),
        **block_tensors(config, prefix + names.block, "block"),
        f"{prefix}{names.norm}.weight": Stored(("norm", "scale"), VECTOR),
    }
    if names.head is not None:
        tensors[f"{prefix}{names.head}.weight"] = Stored(("head", "kernel"), LINEAR)
    return tensors


def embedding_copy(config: MTPConfig, policy_layers: int) -> str | None:
    """The name under which the convention keeps a copy of the policy's embedding, if it does."""
    names = NAMES[config.convention.name]
    return None if names.copy is None else f"{names.prefix.format(layer=policy_layers)}{names.copy}.weight"


def mtp_names(names: Iterable[str], policy_layers: int) -> dict[ConventionName, list[str]]:
    """The names that belong to MTP heads, by convention, of the names in a policy's checkpoint.

    A layer behind the policy's last counts as a head where it has an `eh_proj`: otherwise config.json cuts the policy.
    """
    names = set(names)
    found: dict[ConventionName, list[str]] = {"qwen3_next": [], "deepseek_v3": [], "mimo": []}
    for name in sorted(names):
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if name.startswith(_QWEN):
            found["qwen3_next"].append(name)
        elif name.startswith(_MIMO):
            found["mimo"].append(name)
        elif layer and int(layer[1]) >= policy_layers and f"{layer[0]}eh_proj.weight" in names:
            found["deepseek_v3"].append(name)
    return {convention: members for convention, members in found.items() if members}
